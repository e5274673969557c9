"""Quantise weights after training, from flatbuffer to flatbuffer, by NumPy alone."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path

from quarl_tf.foundation import provenance
from quarl_tf.foundation.errors import QuarlError, UsageError
from quarl_tf.foundation.files import write_bytes
from quarl_tf.quantization.grid import Array, fake_quantize
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import REFERENCE, Scheme
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import sidecar_path, write_artifact


def quantized(content: bytes, scheme: Scheme) -> bytes:
    """Put every kernel of a float32 flatbuffer on its grid.

    The papers' granularity: one grid for a fully-connected kernel, one per output channel for a
    convolution (QuaRL, Krishnan et al., arXiv 1910.01055, section 3). All else stays as it is.

    Args:
        content: The flatbuffer.
        scheme: A `ptq_wN` or `ptq_paper_wN`.

    Raises:
        UsageError: The scheme is none of these.
        QuarlError: The flatbuffer is damaged or none.
    """
    form = scheme.recipe.default.weights
    if form is None or scheme.rounding is None or scheme.single_layers:
        raise UsageError(
            "Without its training a flatbuffer can become ptq_wN and ptq_paper_wN, for N = 2 ... "
            f"32, of all layers. Received: scheme={scheme.name!r}"
        )

    def change(operator: str, kernel: Array) -> Array:
        return fake_quantize(kernel, form, None if operator == "FULLY_CONNECTED" else 0)

    return flatbuffer.with_kernels(content, change)


def quantize(source: Path, scheme: Scheme, target: Path | None = None) -> Path:
    """Write a quantised copy of an fp32 flatbuffer, with its sidecar.

    A sidecar that describes these very bytes is left as it is: a file that was not kept comes back.

    Args:
        source: The fp32 flatbuffer.
        scheme: As in `quantized`.
        target: Where to; by default `<scheme>.tflite` beside it.

    Returns:
        The path of the copy.

    Raises:
        UsageError: The scheme is another, or the flatbuffer is not fp32.
        QuarlError: The flatbuffer or its sidecar is missing or damaged.
    """
    policy = Policy.load(source)
    if policy.sidecar.scheme != REFERENCE:
        raise UsageError(
            f"Weights are quantised from {REFERENCE}.tflite. "
            f"Received: scheme={policy.sidecar.scheme!r} of {str(source)!r}"
        )
    content = quantized(flatbuffer.read(source), scheme)
    target = source.with_name(f"{scheme.name}.tflite") if target is None else target
    digest = hashlib.sha256(content).hexdigest()
    with contextlib.suppress(QuarlError):
        known = Sidecar.load(sidecar_path(target))
        if (known.scheme, known.sha256) == (scheme.name, digest):
            write_bytes(target, content)
            return target
    made = replace(
        policy.sidecar,
        scheme=scheme.name,
        native=scheme.native,
        sha256=digest,
        size_bytes=len(content),
        check={},
        versions=provenance.package_versions(),
        commit=provenance.source_commit(),
        sources=provenance.sources(),
    )
    write_artifact(target, content, made)
    return target
