"""Pictures of a run: loss curve, routed tokens along a passage, blocks that heads chose."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernels_pallas.moba import choose_blocks
from modo.config import Config
from modo.nn.decoder import apply_block
from modo.train.metrics import read_metrics, select

# Okabe and Ito's colours, told apart by colour-blind readers.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"


def draw_figures(
    config: Config, workdir: pathlib.Path, data, graphdef, params
) -> list[pathlib.Path]:
    """Draws what there is to see into workdir/figures and returns the files."""
    directory = workdir / "figures"
    directory.mkdir(exist_ok=True)
    paths = [loss_curve(workdir, directory / "loss.png")]
    row = data.validation[0]
    tokens_1T, positions_1T, segment_ids_1T = (
        jnp.asarray(row[name])[None] for name in ("tokens", "positions", "segment_ids")
    )
    params = jax.device_get(params)
    if config.model.depth is not None:
        routing = "predictor" if config.model.depth.predictor else "top_k"
        routed_L1T = _routed_tokens(
            graphdef, params, tokens_1T, positions_1T, segment_ids_1T, routing=routing
        )
        real = int((np.asarray(segment_ids_1T[0]) != 0).sum())  # padding is at the end
        texts = [data.tokenizer.decode([t]) for t in np.asarray(tokens_1T[0, :real])]
        paths.append(
            routing_map(
                np.asarray(routed_L1T[:, 0, :real]),
                texts,
                config.model.routed_layers,
                routing,
                directory / "routing.png",
            )
        )
    whole = [i for i in config.model.moba_layers if i not in config.model.routed_layers]
    if whole:
        layer = whole[0]  # the lowest: nothing below it has to run
        start_1TNJ, valid_1TNJ = _chosen_blocks(
            graphdef, params, tokens_1T, positions_1T, segment_ids_1T, layer=layer
        )
        paths.append(
            block_map(
                np.asarray(start_1TNJ[0]),
                np.asarray(valid_1TNJ[0]),
                config.model.moba.block_size,
                layer,
                directory / "blocks.png",
            )
        )
    return paths


@functools.partial(jax.jit, static_argnames=("graphdef", "routing"))
def _routed_tokens(graphdef, params, tokens_BT, positions_BT, segment_ids_BT, *, routing):
    model = nnx.merge(graphdef, params)
    _, aux = model(
        tokens_BT, positions_BT=positions_BT, segment_ids_BT=segment_ids_BT, routing=routing
    )
    return aux.routed_LBT


@functools.partial(jax.jit, static_argnames=("graphdef", "layer"))
def _chosen_blocks(graphdef, params, tokens_BT, positions_BT, segment_ids_BT, *, layer):
    """`choose_blocks` of one layer's queries and keys."""
    model = nnx.merge(graphdef, params)
    x_BTD = model.embedding(tokens_BT)
    for below in range(layer):
        x_BTD, _ = apply_block(model.block(below), x_BTD, positions_BT, segment_ids_BT)
    block = model.block(layer)
    attention = block.attention
    q_BTNH, k_BTKH = attention.queries_and_keys(
        block.attention_norm(x_BTD), positions_BT, segment_ids_BT
    )
    # A row has no more blocks than tokens, whatever top_k allows.
    top_k = min(attention.top_k, tokens_BT.shape[1])
    sink_blocks = min(attention.sink_blocks, top_k - 1)
    return choose_blocks(
        q_BTNH,
        k_BTKH,
        block_size=attention.block_size,
        top_k=top_k,
        segment_ids=segment_ids_BT,
        sink_blocks=sink_blocks,
        window_blocks=min(attention.window_blocks, top_k - 1 - sink_blocks),
    )


def _new_figure(rows: int, columns: int, size: tuple[float, float]):
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def loss_curve(workdir: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """Training and held-out loss against step."""
    records = read_metrics(workdir)
    figure, axes = _new_figure(1, 1, (6, 4))
    axis = axes[0, 0]
    train = [(r["step"], r["loss"]) for r in select(records, "train")]
    # A line through a single point is no line.
    marker = "." if len(train) == 1 else None
    axis.plot(*zip(*train, strict=True), color=BLUE, linewidth=1, marker=marker, label="training")
    evaluations = select(records, "eval")
    colours = {"predictor": ORANGE, "top_k": GREEN}
    for routing in dict.fromkeys(r["routing"] for r in evaluations):
        points = [(r["step"], r["loss"]) for r in evaluations if r["routing"] == routing]
        axis.plot(
            *zip(*points, strict=True),
            marker={"predictor": "o", "top_k": "x"}.get(routing, "s"),
            color=colours.get(routing, "black"),
            label=f"held out, {routing}",
        )
    axis.set(xlabel="step", ylabel="nats a token")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return path


def routing_map(
    routed_LT: np.ndarray,
    texts: list[str],
    layers: tuple[int, ...],
    routing: str,
    path: pathlib.Path,
) -> pathlib.Path:
    """Which tokens each routed layer computed, along a passage: filled cells under the text."""
    width, lines = 64, min(4, -(-routed_LT.shape[1] // 64))
    routed_LT = routed_LT[:, : width * lines]
    # Fonts have no picture of control characters, and ours none of many others.
    labels = [re.sub(r"[^\x20-\u04ff\ufffd]|[\x7f-\xa0]", " ", t.replace("\n", "¶")) for t in texts]
    longest = min(8, max(map(len, labels[: width * lines])))
    height = 0.6 + 0.16 * len(layers) + (0.09 * longest if longest > 1 else 0)
    figure, axes = _new_figure(lines, 1, (12, 0.6 + height * lines))
    for line in range(lines):
        axis, part = axes[line, 0], slice(line * width, (line + 1) * width)
        axis.imshow(
            routed_LT[:, part], aspect="auto", cmap="Blues", vmin=0, vmax=1.3, interpolation="none"
        )
        text = [label[:longest] for label in labels[part]]
        rotation = 90 if longest > 1 else 0  # tokens of several characters stand on end
        axis.set_xticks(
            range(len(text)),
            text,
            rotation=rotation,
            fontfamily="monospace",
            parse_math=False,
        )
        axis.xaxis.tick_top()
        axis.set_yticks(range(len(layers)), [str(layer) for layer in layers])
        axis.tick_params(length=0)
        axis.set_ylabel("layer")
        axis.set_xlim(-0.5, width - 0.5)
    share = routed_LT.mean()
    figure.suptitle(
        f"Tokens computed by each routed layer in these lines, {routing} routing: {share:.1%}"
    )
    figure.savefig(path, dpi=150)
    return path


def block_map(
    start_TNJ: np.ndarray,
    valid_TNJ: np.ndarray,
    block_size: int,
    layer: int,
    path: pathlib.Path,
) -> pathlib.Path:
    """Which past blocks the heads of one layer chose for each token of one document."""
    length, heads, _ = start_TNJ.shape
    heads = min(4, heads)
    figure, axes = _new_figure(1, heads, (3 * heads + 0.5, 3.9))
    for head in range(heads):
        seen_TT = np.zeros((length, length))
        for t in range(length):
            seen_TT[t, t // block_size * block_size : t + 1] = 0.4
            for start in start_TNJ[t, head][valid_TNJ[t, head]]:
                seen_TT[t, start : start + block_size] = 1.0
        axis = axes[0, head]
        axis.imshow(seen_TT, cmap="Blues", vmin=0, vmax=1.3, interpolation="none")
        axis.set(title=f"head {head}", xlabel="key")
    axes[0, 0].set_ylabel("query")
    figure.suptitle(f"Layer {layer}: own block (light) and chosen blocks of {block_size} (dark)")
    figure.savefig(path, dpi=150)
    return path
