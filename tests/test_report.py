"""Behaviour of the report on records as the other stages write them."""

import csv
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from quarl_tf import flatbuffer, plots
from quarl_tf.errors import QuarlError, UsageError
from quarl_tf.records import (
    Evaluation,
    Sidecar,
    Workspace,
    evaluation_path,
    sha256,
    sidecar_path,
    write_bytes,
    write_csv,
)
from quarl_tf.report import Row, limits, number_text, percent, size, write_report
from quarl_tf.spec import Run, Scheme

SCHEMES = ("fp32", "fp16", "int8", "ptq_w8", "ptq_w4", "ptq_w2")
EPISODES = 30
PROTOCOL = {"action": "greedy", "return": "unclipped", "episode": "whole"}
SIZES = {"fp32": 272_480, "fp16": 138_240, "int8": 75_910}
#: Size of the float file that holds a simulated scheme; it must not be seen anywhere.
SIMULATED_SIZE = 271_828


def returns_of(scheme: str, episodes: int = EPISODES) -> list[float]:
    """Return CartPole-like returns: all perfect but for few bits."""
    generator = np.random.default_rng(7)
    if scheme == "random":
        return generator.integers(9, 50, episodes).astype(float).tolist()
    if scheme == "ptq_w2":
        return generator.integers(8, 12, episodes).astype(float).tolist()
    if scheme == "ptq_w4":
        return np.minimum(500, generator.normal(440, 60, episodes).round()).tolist()
    return [500.0] * episodes


def sidecar_of(run: Run, scheme: str, size_bytes: int) -> Sidecar:
    return Sidecar(
        run=run.to_dict(),
        run_id=run.run_id,
        env_id=run.env_id,
        scheme=scheme,
        native=Scheme.parse(scheme).native,
        sha256="",
        size_bytes=size_bytes,
        head="q_values",
        num_actions=2,
        action_low=None,
        action_high=None,
        observation_shape=[4],
        observation_dtype="float32",
        tensor_dtypes={"float32": 12},
        weight_dtypes={"int8": 67_584, "int32": 514} if scheme == "int8" else {"float32": 68_098},
        operators=["FULLY_CONNECTED float32"],
        check={"largest_difference": 1e-7},
        network_sha256="ab" * 32,
        calibration_sha256=None,
        preset={"steps": 50_000, "learning_rate": 0.0023},
        versions={"numpy": "2.3.5", "tensorflow": "2.21.0"},
        commit="0123456789ab",
    )


def evaluation_of(run: Run, scheme: str, returns: list[float], digest: str | None) -> Evaluation:
    latency = {"fp32": 9.1, "fp16": 9.0, "int8": 5.6}.get(scheme, 9.2)
    return Evaluation(
        run_id=run.run_id,
        env_id=run.env_id,
        scheme=scheme,
        artifact_sha256=digest,
        protocol=PROTOCOL,
        seeds=[2**30 + i for i in range(len(returns))],
        returns=returns,
        lengths=[int(r) for r in returns],
        ties=3 if scheme == "int8" else 0,
        latency_us=None if scheme == "random" else {"median": latency, "p95": latency * 1.2},
        agreement=None if scheme == "random" else {"fraction": 0.993, "states": 5000},
        versions={"numpy": "2.3.5", "ai-edge-litert": "2.1.0"},
    )


def evaluate(workspace: Workspace, run: Run, scheme: str, returns: list[float]) -> None:
    artifact = workspace.artifact(run.run_id, scheme)
    digest = None if scheme == "random" else sha256(artifact)
    evaluation_of(run, scheme, returns, digest).save(evaluation_path(artifact))


def add_run(workspace: Workspace, seed: int = 0, **options: object) -> Run:
    """Write a finished run: flatbuffers, sidecars, evaluations, the random baseline, a curve."""
    run = Run("dqn", str(options.get("env_id", "CartPole-v1")), seed)
    for scheme in SCHEMES:
        artifact = workspace.artifact(run.run_id, scheme)
        write_bytes(artifact, f"{scheme} {seed}".encode())
        sidecar = sidecar_of(run, scheme, SIZES.get(scheme, SIMULATED_SIZE))
        replace(sidecar, sha256=sha256(artifact)).save(sidecar_path(artifact))
        evaluate(workspace, run, scheme, returns_of(scheme, int(str(options.get("episodes", EPISODES)))))
    evaluate(workspace, run, "random", returns_of("random"))
    rows = [
        {"step": step, "episode_return": step / 100, "greedy_return": "" if step % 2000 else 480}
        for step in range(1000, 50_000, 1000)
    ]
    write_csv(workspace.artifact_dir(run.run_id) / "progress.csv", rows)
    return run
