"""What is said of processors."""

import platform

import pytest

from quarl_tf.foundation import provenance

_AMD = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse2 avx avx2 {}\n"
_ARM = "processor\t: 0\nFeatures\t: fp asimd evtstrm{}\nCPU part\t: 0xd03\n"


@pytest.mark.parametrize(
    ("information", "described", "lacking"),
    [
        (_AMD.format(""), "AMD EPYC with avx2", True),
        (_AMD.format("avx512f avx512bw"), "AMD EPYC with avx512bw", True),
        (_AMD.format("avx512f avx512bw avx512_bf16"), "AMD EPYC with avx512_bf16", False),
        (_AMD.format("amx_bf16 avx512_bf16"), "AMD EPYC with amx_bf16", False),
        (_ARM.format(""), f"{platform.machine()} with asimd", True),
        (_ARM.format(" i8mm bf16"), f"{platform.machine()} with bf16", False),
        ("", platform.machine(), False),
    ],
)
def test_processors_have_a_name_and_their_best_extension(
    information: str, described: str, lacking: bool
) -> None:
    assert provenance.describe_processor(information) == described
    assert provenance.lacks_bfloat16(described) == lacking
