"""Replace the latencies in published evaluations, for instance of files played on a busy machine.

    python benchmarks/latencies.py FILE [FILE ...]

Name the fp32 file, too, which tells how many times as fast the others are. The machine must be at
rest, and be the one that played the files.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from quarl_tf.evaluation.bench import bench
from quarl_tf.foundation.display import progress_bar
from quarl_tf.foundation.errors import QuarlError
from quarl_tf.spec import GREEDY
from quarl_tf.store.records import Evaluation

_RUNTIME = "ai-edge-litert"


def save(result: dict[str, Any]) -> list[Path]:
    """Replace the latencies of greedy evaluations by those of `bench`; return the changed files.

    A QuarlError, with nothing changed, where the machine was not at rest, or this processor played
    no evaluation of a file.
    """
    if not result["at_rest"]:
        raise QuarlError(
            "Latencies of a machine that is not at rest are not saved; end what else runs, and "
            f"measure again. Received: a load of {result['load_average']:.2f} of a core, loops of "
            f"{result['spread']:.2f} times their median"
        )
    evaluations: dict[Path, Evaluation] = {}
    rows = {Path(row["artifact"]): row for row in result["artifacts"]}
    for path, row in rows.items():
        latency, fp32 = dict(row["latency_us"]["1"]), rows.get(path.with_name("fp32.tflite"))
        turns = {} if fp32 is None else {fp32["sha256"]: fp32["latency_us"]["1"]["median"]}
        turns.pop(row["sha256"], None)
        changed = {
            target: replace(evaluation, latency_us=latency | _of_reference(evaluation, turns))
            for target in sorted(path.parent.glob(f"{path.stem}.*eval.json"))
            if (evaluation := Evaluation.load(target)).protocol.actions == GREEDY.actions
            and evaluation.artifact_sha256 == row["sha256"]
            and evaluation.processor == result["processor"]
            and evaluation.versions.get(_RUNTIME) == result["versions"].get(_RUNTIME)
        }
        if not changed:
            raise QuarlError(
                f"This file has no greedy evaluation on this processor by this {_RUNTIME}; "
                "evaluate it here, without its .eval.json if there is one. "
                f"Received: path={str(path)!r} on {result['processor']}"
            )
        evaluations |= changed
    for target, evaluation in evaluations.items():
        evaluation.save(target)
    return list(evaluations)


def _of_reference(evaluation: Evaluation, turns: dict[str, float]) -> dict[str, float]:
    median = turns.get(evaluation.reference_sha256 or "")
    return {} if median is None else {"fp32": median}


def main() -> None:
    """Time files, save their latencies, and print the changed files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--calls", type=int, default=2000)
    args = parser.parse_args()
    try:
        with progress_bar("bench") as update:
            result = bench(args.files, args.calls, update)
        print(*save(result), sep="\n")
    except QuarlError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
