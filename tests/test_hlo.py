import os
import pathlib
import subprocess
import sys

import pytest

from modo import hlo

# A scan of five steps around a loop of two that counts by three, a branch, and collectives in the
# forms that compilers print.
TEXT = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%inner_condition (p.0: (s32[], f32[8,16])) -> pred[] {
  %p.0 = (s32[], f32[8,16]{1,0}) parameter(0)
  %i.0 = s32[] get-tuple-element(%p.0), index=0
  %end = s32[]{:T(128)} constant(5)
  ROOT %less.0 = pred[] compare(%i.0, %end), direction=LT
}

%count (n: s32[], m: s32[]) -> s32[] {
  %n = s32[] parameter(0)
  %m = s32[] parameter(1)
  ROOT %n.1 = s32[] add(%m, %n)
}

%inner_body (p.1: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p.1 = (s32[], f32[8,16]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %v.1 = f32[8,16]{1,0} get-tuple-element(%p.1), index=1
  %moved = f32[8,16]{1,0} collective-permute(%v.1), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %by = s32[] constant(3)
  %next = s32[] add(%i.1, %by)
  ROOT %t.1 = (s32[], f32[8,16]{1,0}) tuple(%next, %moved)
}

%outer_condition (p.2: (s32[], f32[8,16])) -> pred[] {
  %p.2 = (s32[], f32[8,16]{1,0}) parameter(0)
  ROOT %unread = pred[] custom-call(%p.2), custom_call_target="unreadable"
}

%outer_body (p.3: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %p.3 = (s32[], f32[8,16]{1,0}) parameter(0)
  %v.3 = f32[8,16]{1,0} get-tuple-element(%p.3), index=1
  %sum.3 = f32[8,16]{1,0} all-reduce(%v.3), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add, \
metadata={op_name="jit(step)/while/body/psum"}
  %loop.3 = (s32[], f32[8,16]{1,0}) while(%p.3), condition=%inner_condition, body=%inner_body
  ROOT %t.3 = (s32[], f32[8,16]{1,0}) tuple(%v.3, %sum.3)
}

%scattered (p.4: bf16[128,64]) -> bf16[16,64] {
  %p.4 = bf16[128,64]{1,0:T(8,128)(2,1)} parameter(0)
  %all.4 = bf16[128,64]{1,0} all-reduce(%p.4), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %mine = bf16[16,64]{1,0} dynamic-slice(%all.4, %zero, %zero), dynamic_slice_sizes={16,64}
}

%start (p.5: bf16[4,8]) -> (bf16[4,8], bf16[8,8]) {
  %p.5 = bf16[4,8]{1,0} parameter(0)
  %g.5 = bf16[8,8]{1,0} all-gather(%p.5), replica_groups=mesh['a'=4,'b'=2] {'b'}, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}
  ROOT %c.5 = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) custom-call(%g.5), \
custom_call_target="AsyncCollectiveStart"
}

%step (p.6: bf16[4,8], q.6: f32[2,2]) -> f32[2,2] {
  %p.6 = bf16[4,8]{1,0} parameter(0)
  %q.6 = f32[2,2]{1,0} parameter(1)
  %g.6 = bf16[8,8]{1,0} all-gather(%p.6), replica_groups=mesh['a'=4,'b'=2] {'b'}, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2"}}
  ROOT %m.6 = f32[2,2]{1,0} multiply(%q.6, %q.6)
}

%wrapped (p.7: f32[8,4]) -> f32[8,4] {
  %p.7 = f32[8,4]{1,0} parameter(0)
  ROOT %a.7 = f32[8,4]{1,0} all-to-all(%p.7), replica_groups={{0,1},{2,3},{4,5},{6,7}}
}

%branch (p.8: f32[8,16]) -> f32[8,16] {
  %p.8 = f32[8,16]{1,0} parameter(0)
  ROOT %b.8 = f32[8,16]{1,0} all-reduce(%p.8), replica_groups={}, to_apply=%add
}

ENTRY %main (a: f32[8,16], b: bf16[128,64], c: bf16[4,8], d: f32[2,2], e: f32[8,4]) -> f32[2,2] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = bf16[128,64]{1,0:T(8,128)(2,1)} parameter(1)
  %c = bf16[4,8]{1,0} parameter(2)
  %d = f32[2,2]{1,0} parameter(3)
  %e = f32[8,4]{1,0} parameter(4)
  %state = (s32[], f32[8,16]{1,0}) tuple(%d, %a)
  %loop = (s32[], /*index=1*/f32[8,16]{1,0}) while(%state), condition=%outer_condition, \
body=%outer_body, backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0"}}
  %rs = bf16[16,64]{1,0} fusion(%b), kind=kCustom, calls=%scattered
  %f.1 = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) fusion(%c), kind=kLoop, calls=%start
  %f.2 = f32[2,2]{1,0} fusion(%c, %d), kind=kLoop, calls=%step
  %s.1 = ((f32[8,4]{1,0}), f32[8,4]{1,0}, u32[]) async-start(%e), calls=%wrapped
  %d.1 = f32[8,4]{1,0} async-done(%s.1)
  %s.2 = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(%c), replica_groups=[1,8]<=[8], \
dimensions={0}
  %d.2 = bf16[32,8]{1,0} all-gather-done(%s.2)
  %if = f32[8,16]{1,0} conditional(%d, %a, %a), branch_computations={%branch, %branch}
  %ignored = f32[] constant(0)
  ROOT %out = f32[2,2]{1,0} copy(%f.2)
}
"""
SCANNED, BLOCK = 8 * 16 * 4, 4 * 8 * 2


def test_collectives_of_known_text():
    found = hlo.collectives(hlo.parse(TEXT), num_devices=8)
    assert sorted((c.kind, c.times, c.group, c.sent_bytes) for c in found) == sorted(
        [
            ("collective-permute", 10, 8, SCANNED),
            ("all-reduce", 5, 4, 2 * SCANNED * 3 / 4),
            ("reduce-scatter", 1, 8, 128 * 64 * 2 * 7 / 8),
            ("all-gather", 1, 2, BLOCK),  # one asynchronous, in three fusions or more
            ("all-to-all", 1, 2, 8 * 4 * 4 / 2),
            ("all-gather", 1, 8, BLOCK * 7),  # start and done
            ("all-reduce", 2, 8, 2 * SCANNED * 7 / 8),  # both branches
        ]
    )
    [psum] = [c for c in found if c.op_name]
    assert psum.op_name == "jit(step)/while/body/psum" and psum.shapes == ("f32[8,16]",)


def test_loops():
    assert hlo.executions(hlo.parse(TEXT)).unknown_loops == 0
    unknown = hlo.parse(TEXT.replace('"known_trip_count":{"n":"5"},', ""))
    assert hlo.executions(unknown).unknown_loops == 1
    assert [c.times for c in hlo.collectives(unknown, 8) if c.kind == "collective-permute"] == [2]
    in_a_fusion = TEXT.replace("add(%i.1, %by)", "fusion(%i.1, %by), kind=kLoop, calls=%count")
    assert hlo.executions(hlo.parse(in_a_fusion)).times["inner_body"] == 10
    for one, other in (
        ("direction=LT", "direction=NE"),
        ("add(%i.1", "multiply(%i.1"),
        ("compare(%i.0, %end)", "compare(%i.0, %i.0)"),
    ):
        assert hlo.executions(hlo.parse(TEXT.replace(one, other))).unknown_loops == 1


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups={{0,2,4},{1,3,5}}, use_global_device_ids=true", 3),
        ("replica_groups=[32,16]<=[8,8,8]T(2,0,1)", 16),
        ("replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2] {'axis_1','axis_2'}, x=1", 8),
        ("replica_groups=mesh['a'=16] {'a':(2)4}", 4),
        ("replica_groups=mesh['a'=32,'b'=16], device_ids=([4,32,4]T(1,0,2)) {'a'}, dims={0}", 32),
        ("replica_groups={}, dimensions={0}", None),
        ("channel_id=3", None),
    ],
)
def test_group_size(attributes, size):
    assert hlo.group_size(attributes) == size


def test_unknown_groups_are_an_error():
    with pytest.raises(ValueError, match="replica_groups=<new>"):
        hlo.group_size("replica_groups=<new>, dimensions={0}")


def test_array_bytes():
    assert hlo.array_bytes("bf16[8,128]{1,0:T(8,128)(2,1)}") == 2048
    assert hlo.array_bytes("(f32[3]{0}, (pred[4]{0}, u32[]{:S(2)}))") == 12 + 4 + 4
    assert hlo.array_bytes("(s4[6]{0:T(8)E(4)}, f8e4m3fn[5]{0}, token[])") == 3 + 5
    on_chip = "(f32[16]{0:T(128)S(1)}, f32[8]{0:T(128)}, s32[]{:S(6)})"
    assert hlo.array_bytes(on_chip, hbm_only=True) == 32


def traffic(*lines: str, computations: str = "") -> int:
    parameters = [
        "  %big = f32[10,100]{1,0} parameter(0)",
        "  %row = f32[1,100]{1,0} parameter(1)",
        "  %i = s32[]{:S(6)} parameter(2)",
        "  %near = f32[10,100]{1,0:T(8,128)S(1)} parameter(3)",
    ]
    body = "\n".join([*parameters, *lines])
    return hlo.traffic(
        hlo.parse(f"{computations}\nENTRY %main (big: f32[]) -> f32[] {{\n{body}\n}}")
    )


FUSIONS = """
%cut (p.0: f32[10,100], p.1: s32[]) -> f32[1,100] {
  %p.0 = f32[10,100]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %s = f32[1,100]{1,0} dynamic-slice(%p.0, %p.1, %p.1), dynamic_slice_sizes={1,100}
}

%put (q.0: f32[10,100], q.1: f32[1,100], q.2: s32[]) -> f32[10,100] {
  %q.0 = f32[10,100]{1,0} parameter(0)
  %q.1 = f32[1,100]{1,0} parameter(1)
  %q.2 = s32[] parameter(2)
  ROOT %u = f32[10,100]{1,0} dynamic-update-slice(%q.0, %q.1, %q.2, %q.2)
}
"""


def test_traffic():
    big, row = 4000, 400
    assert traffic("  %a = f32[10,100]{1,0} add(%big, %big)") == 3 * big
    assert traffic("  %a = f32[10,100]{1,0} add(%big, %near)") == 2 * big
    assert traffic("  %a = f32[10,100]{1,0:S(1)} copy(%near)") == 0
    assert traffic("  %a = f32[1,100]{1,0} dynamic-slice(%big, %i, %i)") == 2 * row
    assert traffic("  %a = f32[10,100]{1,0} dynamic-update-slice(%big, %row, %i, %i)") == 2 * row
    in_fusions = (
        "  %a = f32[1,100]{1,0} fusion(%big, %i), kind=kLoop, calls=%cut",
        "  %b = f32[10,100]{1,0} fusion(%big, %row, %i), kind=kLoop, calls=%put",
    )
    assert traffic(*in_fusions, computations=FUSIONS) == 4 * row
    # From the memory to the chip: read once.
    start = "  %a = (f32[10,100]{1,0:S(1)}, f32[10,100]{1,0}, u32[]{:S(2)}) copy-start(%big)"
    assert traffic(start, "  %b = f32[10,100]{1,0:S(1)} copy-done(%a)") == big


def test_square_arrays():
    text = "f32[4,64,64]{2,1,0} bf16[64,16,128] pred[8,64] f32[64,32] f32[64]"
    assert hlo.square_arrays(text, 64) == ["f32[4,64,64]"]
    assert hlo.square_arrays(text, 64, parts=4) == ["bf16[64,16,128]", "f32[4,64,64]"]
    assert hlo.square_arrays(text, 2048) == []


def test_collectives_of_a_compiled_program():
    """In a process of its own, where the CPU counts as eight devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", "tests.collectives"]
    root = pathlib.Path(__file__).parents[1]
    subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags}, cwd=root, check=True)
