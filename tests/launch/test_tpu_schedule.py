"""Cycles read from a schedule written by hand, and the kernels' schedules against the figures they must keep."""

import importlib.util

import pytest

from launch.tpu_schedule import count_cycles, schedule

STRAIGHT = """
// a comment
     0   :  { %s1 = smov 0 }
   0x1   :  { %v2 = vld [vmem:%s1] ;; %v3 = vadd.f32 %v2, %v2 }
   0x2   :  { vst [vmem:%s1] %v3 }
"""
# Two bundles, a loop of four (its test is in the second; the branch's delay slots are in it), and one after the loop.
LOOP = """
     0   :  { %s1 = smov 0 }
   0x1   :  { %s2 = smov 1 }
   0x2 LB: > { %s3 = sadd.s32 1, %s1 }
   0x3   : > { %p4 = scmp.ge.s32.totalorder %s3, 7 /* loop exit test */ }
   0x4   : > { %5 = sbr.rel (!%p4) target = 0x2 }
   0x5   : > { %v6 = vadd.f32 %v6, %v6 }
   0x6   : > { }
   0x7   : > { }
   0x8   : > { }
   0x9   :  { %s7 = smov 2 }
"""


def test_straight_code_takes_a_cycle_a_bundle():
    assert count_cycles(STRAIGHT) == 3
    assert count_cycles("") == 0


def test_a_loop_counts_as_often_as_it_runs():
    assert count_cycles(LOOP) == 3 + 7 * 7


def test_what_does_not_compile_is_one_line():
    with pytest.raises(ValueError, match=r"^launch.tpu_schedule:nothing for v6e:2x2: AttributeError: [^\n]*$"):
        schedule("launch.tpu_schedule:nothing", "v6e:2x2")


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
@pytest.mark.parametrize(("topology", "temp_bytes"), [("v6e:2x2", 130e6), ("tpu7x:2x2x1", 140e6)])
def test_kda_keeps_half_of_the_best_public_schedule(topology, temp_bytes):
    """The shape of pallas_kernels/README.md; half of tokamax's cycles, which leaves room for another libtpu."""
    got = schedule("launch.bench_kda:program", topology, "ours", "forward+backward", "8192", "8", "128", "bfloat16")
    assert got.kernels == 2
    assert 0 < got.cycles["kda_forward"] <= 430_000
    assert 0 < got.cycles["kda_backward"] < got.total <= 1_035_000
    assert got.temp_bytes <= temp_bytes
