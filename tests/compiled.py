"""Policies in C, compiled as strictly as can be, and what they must compute."""

import os
import subprocess
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from quarl_tf.export import c_source
from quarl_tf.export.graph import Graph
from quarl_tf.runtime.policy import Policy

STRICT = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O2")
SANITIZED = (*STRICT, "-fsanitize=undefined,address", "-fno-sanitize-recover=all")
SOURCES = Path(__file__).parent / "sources"


def run(
    artifact: Path,
    observations: np.ndarray,
    flags: tuple[str, ...] = STRICT,
    *,
    fixed: bool = False,
    board: tuple[str, str] | None = None,
) -> np.ndarray:
    """Write a flatbuffer in C, compile and run it; return heads and actions [2, n, outputs].

    In fixed point they are integers, as observations are. A board is another compiler, and what
    runs its programs here.
    """
    c_source.write(artifact, fixed=fixed)
    policy = Policy.load(artifact)
    number, dtype = ("int32_t", np.int32) if fixed else ("float", np.float32)
    bytes_ = policy.sidecar.observation_dtype == "uint8"
    discrete = policy.sidecar.num_actions is not None
    act = f"action[0] = ({number})policy_act(observation)"
    act = act if discrete else "policy_act(observation, action)"
    folder, kind = artifact.parent, "uint8_t" if bytes_ else number
    macros = f'-DHEADER="{artifact.stem}.h"', f"-DTYPE={kind}", f"-DNUMBER={number}", f"-DACT={act}"
    names = [str(SOURCES / "main.c"), f"{artifact.stem}.c", "-I.", "-o", "program", "-lm"]
    compiler, *runner = board or ("gcc",)
    subprocess.run([compiler, *flags, *macros, *names], cwd=folder, check=True)
    completed = subprocess.run(
        [*runner, folder / "program"],
        input=observations.astype(np.uint8 if bytes_ else dtype).tobytes(),
        stdout=subprocess.PIPE,
        check=True,
        # Its search for leaks needs ptrace, which containers forbid.
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )
    outputs = np.frombuffer(completed.stdout, dtype).reshape(len(observations), 2, -1)
    return outputs.transpose(1, 0, 2)


def around(artifact: Path, count: int) -> np.ndarray:
    """Draw observations around the mean of the normaliser, some far beyond its range."""
    graph = Graph(artifact.read_bytes())
    mean, inverse = (graph.constant(operator.inputs[1]) for operator in graph.operators[:2])
    shape = count, *Policy.load(artifact).sidecar.observation_shape
    return (mean + np.random.default_rng(0).normal(0, 2, shape) / inverse).astype(np.float32)


def reference_heads(artifact: Path, observations: np.ndarray) -> np.ndarray:
    """Return the heads by LiteRT's reference kernels: [n, outputs]."""
    resolver = OpResolverType.BUILTIN_REF
    interpreter = Interpreter(str(artifact), experimental_op_resolver_type=resolver)
    interpreter.allocate_tensors()
    (source,), (head,) = interpreter.get_input_details(), interpreter.get_output_details()
    heads = []
    for observation in observations:
        interpreter.set_tensor(source["index"], observation[None].astype(source["dtype"]))
        interpreter.invoke()
        heads.append(interpreter.get_tensor(head["index"])[0].copy())
    return np.array(heads)


def check(artifact: Path, observations: np.ndarray, flags: tuple[str, ...] = STRICT) -> None:
    """Compare heads with the reference kernels, actions with the default runtime."""
    heads, actions = run(artifact, observations, flags)
    expected = reference_heads(artifact, observations)
    np.testing.assert_array_equal(heads.view(np.int32), expected.view(np.int32))
    policy = Policy.load(artifact)
    runtime_actions = np.array([policy.act(observation) for observation in observations])
    if policy.sidecar.num_actions is not None:
        np.testing.assert_array_equal(actions[:, 0], expected.argmax(axis=1))
        # Convolutions may differ by a code there, which decides between actions that nearly tie.
        limit = 0.02 if policy.sidecar.observation_dtype == "uint8" else 0
        unequal = actions[:, 0] != runtime_actions
        assert unequal.mean() <= limit
        leads = heads.max(axis=1) - heads[np.arange(len(heads)), runtime_actions]
        assert leads[unequal].max(initial=0) < 0.001 * np.ptp(heads)
    else:
        bounds = policy.sidecar.action_low, policy.sidecar.action_high
        low, high = (np.array(bound, np.float32) for bound in bounds)
        np.testing.assert_array_equal(actions, np.clip(expected, low, high))
        # Floats are summed in another order there, and halves go to either code.
        assert (np.abs(actions - runtime_actions) > 1e-5).any(axis=1).mean() < 0.01
