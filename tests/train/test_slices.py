"""TPU slices are far from each other: only the data axis goes across them."""

import types

import jax
import pytest

from modo.config import MeshConfig
from modo.errors import UserError
from modo.train import mesh


@pytest.fixture
def devices(monkeypatch):
    """Two slices of four chips, without order; a mesh of them keeps the array alone."""

    def keep(grid, names, axis_types):
        return types.SimpleNamespace(devices=grid, axis_names=names)

    monkeypatch.setattr(mesh, "Mesh", keep)
    client = jax.devices()[0].client
    return [
        types.SimpleNamespace(
            id=i, slice_index=i % 2, process_index=i, device_kind="TPU", platform="tpu",
            client=client, coords=(i // 2, 0, 0), core_on_chip=0,
        )
        for i in range(8)
    ]  # fmt: skip


def test_data_goes_across_slices_and_all_else_within_one(devices):
    grid = mesh.make_mesh(MeshConfig(data=4, fsdp=2), devices).devices
    assert grid.shape == (4, 2, 1, 1)
    of_slice = [{device.slice_index for device in rows.flat} for rows in grid]
    assert all(len(indices) == 1 for indices in of_slice)
    assert of_slice[0] == of_slice[1] != of_slice[2] == of_slice[3]
    assert {device.id for device in grid.flat} == set(range(8))


def test_a_data_axis_that_slices_do_not_divide(devices):
    with pytest.raises(UserError, match="mesh data 1 cannot be cut over 2 slices"):
        mesh.make_mesh(MeshConfig(data=1, fsdp=8), devices)
