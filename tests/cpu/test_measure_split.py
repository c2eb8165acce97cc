"""Device time by part: which kernel belongs to which part, and how a profile becomes milliseconds a call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from attnbench.measure.split import parts, per_call, short_name

BACKWARD = {
    "Memset (Device)": 0.01,
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int, float)": 0.02,
    "sm90_backward_prepare": 0.1,
    "void attention_backward<128, 128, true, false>(Params)": 2.0,
    "sm90_backward_finish": 0.2,
    "Memcpy DtoD (Device -> Device)": 0.3,
}


def test_kernels_are_summed_by_part_in_the_order_in_which_they_run() -> None:
    found = parts(BACKWARD)
    assert list(found) == ["zero_fill", "preprocess", "main", "postprocess", "copy"]
    assert found == pytest.approx({"zero_fill": 0.03, "preprocess": 0.1, "main": 2.0, "postprocess": 0.2, "copy": 0.3})
    assert parts({}) == {}


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("void flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128>>(Flash_bwd_params)", "preprocess"),
        ("void flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<128>>(Flash_bwd_params, int)", "postprocess"),
        ("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Traits>(Flash_bwd_params)", "main"),
        ("attention_dkv_hopper", "main"),
        ("_column_sum_kernel", "postprocess"),
    ],
)
def test_parts_of_peers(kernel: str, part: str) -> None:
    assert parts({kernel: 1.0}) == {part: 1.0}


def test_names_are_cut_to_what_a_person_looks_for() -> None:
    assert [short_name(name) for name in BACKWARD] == [
        "Memset (Device)",
        "at::native::vectorized_elementwise_kernel",
        "sm90_backward_prepare",
        "attention_backward",
        "sm90_backward_finish",
        "Memcpy DtoD (Device -> Device)",
    ]


def test_a_profile_becomes_milliseconds_a_call_without_the_eviction() -> None:
    events = [
        SimpleNamespace(key="main", self_device_time_total=5000.0),
        SimpleNamespace(key="void at::native::bitwise_not_kernel<char>()", self_device_time_total=9000.0),
        SimpleNamespace(key="cudaLaunchKernel", self_device_time_total=0.0),
    ]
    assert per_call(events, 5) == {"main": 1.0}
