"""Small prepared tfds sets, written without TensorFlow."""

import json
import struct

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, bits reversed


def _crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ _POLYNOMIAL * (crc & 1)
    return crc ^ 0xFFFFFFFF


def _masked(data):
    crc = _crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def write_tfrecords(path, records):
    with open(path, "xb") as file:
        for record in records:
            length = struct.pack("<Q", len(record))
            file.write(length + _masked(length) + record + _masked(record))


def write_array_records(path, records):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def write_set(root, name, splits, *, file_format="array_record", field="text", **info):
    """Writes root/NAME/1.0.0 with splits {name: files}, each a list of documents."""
    directory = root / name / "1.0.0"
    directory.mkdir(parents=True)
    features = tfds.features.FeaturesDict(
        {field: tfds.features.Text(), "score": tfds.features.Scalar(np.int32)}
    )
    features.save_config(str(directory))
    write = write_tfrecords if file_format == "tfrecord" else write_array_records
    infos = []
    for split, files in splits.items():
        for number, documents in enumerate(files):
            file = f"{name.split('/')[0]}-{split}.{file_format}-{number:05}-of-{len(files):05}"
            records = [features.serialize_example({field: d, "score": 1}) for d in documents]
            write(directory / file, records)
        infos.append(
            {
                "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
                "name": split,
                "numBytes": "1",
                "shardLengths": [str(len(documents)) for documents in files],
            }
        )
    about = {
        "name": name.split("/")[0],
        "version": "1.0.0",
        "fileFormat": file_format,
        "splits": infos,
        **info,
    }
    (directory / "dataset_info.json").write_text(json.dumps(about))
    return directory
