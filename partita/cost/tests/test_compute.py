"""The roofline: classes, bounds, shape efficiency, and measured entries."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.cluster import Curve, Measured, Product, named
from partita.cost.compute import Work, class_of, efficiency, price, product_rate
from partita.program.events import Phase

H100, CPU = named("8x8-h100"), named("cpu")


def product(m, n, k, count=1, dtype="bfloat16", size=0):
    return Work("mm", "matmul", dtype, 2 * count * m * n * k, size or 2 * (m * k + k * n + m * n) * count, count, m, n, k)


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("addmm", "matmul"), ("convolution_backward", "matmul"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("native_layer_norm_backward", "norm"), ("_log_softmax", "softmax"), ("embedding_dense_backward", "gather"),
        ("gelu_backward", "activation"), ("sum", "reduction"), ("clone", "copy"), ("_fused_adamw_", "optimizer"),
        ("add_", "elementwise"),
        ("bernoulli_", "random"), ("addcmul_", "elementwise"), ("sub", "elementwise"), ("masked_fill", "elementwise"),
    ],
)  # fmt: skip
def test_ops_have_classes(op, kind):
    assert class_of(op) == kind


def test_a_large_product_is_bound_by_flop_and_a_thin_one_by_bytes():
    assert price(product(8192, 8192, 8192), Phase.FORWARD, H100).bound == "flop"
    assert price(product(8192, 8, 8, size=1 << 28), Phase.FORWARD, H100).bound == "bytes"
    assert price(Work("add", "elementwise", "bfloat16", 0, 1 << 28), Phase.FORWARD, H100).key == "device.bandwidth"


@pytest.mark.published
def test_a_large_product_reaches_the_measured_share_of_the_peak():
    """S. Bekman, ml-engineering: 794.5 of 989 TFLOP/s at best on H100; within 10 % for a product that fills its waves."""
    work = product(128 * 33, 256 * 32, 16384)  # 1056 tiles on 132 SMs: 8 whole waves
    assert efficiency(work, H100) == pytest.approx(0.803, rel=0.1)


@pytest.mark.law
@given(m=st.integers(1, 1 << 14), n=st.integers(1, 1 << 14), k=st.integers(1, 1 << 14), count=st.integers(1, 64))
def test_efficiency_is_a_share(m, n, k, count):
    assert 0 < efficiency(product(m, n, k, count), H100) <= H100.value("device.efficiency.matmul")
    assert 0 < efficiency(product(m, n, k, count, "float32"), CPU) <= CPU.value("device.efficiency.matmul")


@pytest.mark.law
def test_time_falls_with_every_rate():
    work = product(4096, 4096, 4096)
    base = price(work, Phase.FORWARD, H100).seconds
    for key, factor in (("device.flop.bfloat16", 2), ("device.efficiency.matmul", 1.1), ("device.launch", 0.5)):
        better = replace(
            H100, numbers={**H100.numbers, key: replace(H100.numbers[key], value=H100.numbers[key].value * factor)}
        )
        assert price(work, Phase.FORWARD, better).seconds < base, key


def test_views_and_bookkeeping_are_free_on_a_gpu():
    assert price(Work("view", "view", "float32", 0, 0), Phase.FORWARD, H100).seconds == 0
    assert price(Work("drop", "none", "float32", 0, 0), Phase.FORWARD, CPU).seconds == 0
    assert price(Work("view", "view", "float32", 0, 0), Phase.FORWARD, CPU).seconds > 0


PRODUCTS = tuple(
    Product("float32", 1, m, n, k, 2 * m * n * k / rate)
    for m, n, k, rate in ((64, 64, 64, 4e10), (512, 512, 512, 8e10), (4096, 512, 512, 9e10))
)


def measured():
    ops = {("gelu", "float32"): Curve((1e3, 1e6), (1e-6, 1e-3)), ("elementwise", "float32"): Curve((1e3,), (2e-6,))}
    return replace(CPU, measured=Measured(ops, PRODUCTS, source="a probe"))


def test_a_measured_shape_is_returned_exactly():
    work = product(512, 512, 512, dtype="float32")
    assert product_rate(work, PRODUCTS) == pytest.approx(8e10)
    found = price(work, Phase.FORWARD, measured())
    assert (found.bound, found.key) == ("measured", "measured.products")


@pytest.mark.law
@given(m=st.integers(1, 1 << 13), n=st.integers(1, 1 << 13), k=st.integers(1, 1 << 13))
def test_a_rate_lies_between_its_neighbours(m, n, k):
    assert 4e10 * (1 - 1e-9) <= product_rate(product(m, n, k, dtype="float32"), PRODUCTS) <= 9e10 * (1 + 1e-9)


def test_measured_ops_come_before_their_class_and_the_class_before_the_formula():
    def of(op, kind):
        return price(Work(op, kind, "float32", 0, 10_000_000), Phase.OPTIMIZER, measured()).key

    assert of("gelu", "activation") == "measured.ops.gelu"
    assert of("where", "elementwise") == "measured.ops.elementwise"
    assert of("cumsum", "reduction") == "device.bandwidth"
