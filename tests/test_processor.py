"""What is said of processors."""

import platform

import pytest

from quarl_tf import processor

_AMD = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse2 avx avx2 {}\n"
_ARM = "processor\t: 0\nFeatures\t: fp asimd evtstrm{}\nCPU part\t: 0xd03\n"


@pytest.mark.parametrize(
    ("information", "described"),
    [
        (_AMD.format(""), "AMD EPYC with avx2"),
        (_AMD.format("avx512f avx512bw"), "AMD EPYC with avx512bw"),
        (_AMD.format("avx512f avx512bw avx512_bf16"), "AMD EPYC with avx512_bf16"),
        (_AMD.format("amx_bf16 avx512_bf16"), "AMD EPYC with amx_bf16"),
        (_ARM.format(""), f"{platform.machine()} with asimd"),
        (_ARM.format(" i8mm bf16"), f"{platform.machine()} with bf16"),
        ("", platform.machine()),
    ],
)
def test_processors_have_a_name_and_their_best_extension(information: str, described: str) -> None:
    assert processor.describe(information) == described


def test_this_processor_is_described() -> None:
    assert processor.description()
    lacking = processor.description().split()[-1] in ("avx512bw", "avx2", "asimd")
    assert processor.slow_in_bfloat16() == lacking
