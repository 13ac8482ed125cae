"""Warming calls each kernel module once, in order, and tells how long it took."""

import pytest

from moe_serve import warm_kernels


def test_each_warmer_is_called_once_in_order() -> None:
    called: list[str] = []

    def first() -> None:
        called.append("first")

    def second() -> None:
        called.append("second")

    first.__module__ = "a.kernels"
    second.__module__ = "b.kernels"
    seconds = warm_kernels.warm_all((first, second))
    assert called == ["first", "second"]
    assert list(seconds) == ["a.kernels", "b.kernels"]
    assert all(took_s >= 0 for took_s in seconds.values())


def test_a_kernel_that_does_not_compile_is_not_hidden() -> None:
    def broken() -> None:
        raise TypeError("no such signature")

    with pytest.raises(TypeError, match="no such signature"):
        warm_kernels.warm_all((broken,))


def test_main_names_every_kernel_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert warm_kernels.main() == 0
    printed = capsys.readouterr().out
    assert [line.split()[2] for line in printed.splitlines()] == [
        warm.__module__ for warm in warm_kernels.WARMERS
    ]
