"""Act from a flatbuffer: what runs on a board, with NumPy and the LiteRT interpreter alone."""

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quarl_tf.foundation import native_output
from quarl_tf.foundation.errors import QuarlError, UsageError, one_line, unknown
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import actions
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import sidecar_path

try:
    from ai_edge_litert.interpreter import Interpreter
except ModuleNotFoundError:  # LiteRT's former name, on boards without a wheel of today's.
    from tflite_runtime.interpreter import Interpreter

HEADS = ("q_values", "advantages", "logits", "action")

_OBSERVATION_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "uint8": np.dtype(np.uint8),
}

_WARM_UP_CALLS = 100


class Policy:
    """Actions from one flatbuffer; one per thread, for the interpreter is not shared.

    Attributes:
        sidecar: What the flatbuffer's sidecar says.
        ties: Calls of `act` and `sample` so far in which two or more actions shared the best value.
    """

    def __init__(self, content: bytes, sidecar: Sidecar, threads: int = 1) -> None:
        """Load verified bytes; a QuarlError where they are not what the sidecar says."""
        try:
            # The first one of a process announces its delegate.
            with native_output.caught():
                interpreter = Interpreter(model_content=content, num_threads=threads)
                interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise QuarlError(
                f"LiteRT cannot load the flatbuffer ({one_line(error)}); export it again. "
                f"Received: run_id={sidecar.run_id!r}, scheme={sidecar.scheme!r}"
            ) from error
        source, target = _interface(interpreter, sidecar)
        self.sidecar = sidecar
        self.ties = 0
        self._interpreter = interpreter
        self._shape = tuple(sidecar.observation_shape)
        self._dtype = _OBSERVATION_DTYPES[sidecar.observation_dtype]
        self._may_be_infinite = self._dtype.kind == "f"
        self._input = np.zeros(source["shape"], source["dtype"])
        self._input_index = source["index"]
        self._encode = _encoder(self._input[0], self._dtype, *source["quantization"])
        self._output_index = target["index"]
        self._scale, self._zero_point = target["quantization"]
        self._bounds: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None
        if sidecar.head == "action":
            low, high = sidecar.action_low, sidecar.action_high
            self._bounds = np.array(low, np.float32), np.array(high, np.float32)
        choices = sidecar.num_actions
        self._several = choices if isinstance(choices, list) else []
        self._noise = _noise(sidecar)

    @classmethod
    def load(cls, path: str | os.PathLike[str], threads: int = 1) -> Self:
        """Load a flatbuffer that is what its sidecar says, to be run by so many threads.

        The bytes that are hashed are the bytes that run, so nothing can change in between.

        Raises:
            QuarlError: The file or its sidecar is missing, damaged or foreign, or the two do not
                match.
        """
        path = Path(path)
        content = flatbuffer.read(path)
        beside = sidecar_path(path)
        if not beside.is_file():
            raise QuarlError(
                f"{path} has no sidecar {beside.name} beside it; copy both files, or export it "
                f"again. Received: path={str(path)!r}"
            )
        sidecar = Sidecar.load(beside)
        digest = hashlib.sha256(content).hexdigest()
        if digest != sidecar.sha256:
            raise QuarlError(
                f"{path} was changed or damaged after export; export it again. Received: "
                f"{len(content)} bytes, sha256={digest!r}; its sidecar says {sidecar.size_bytes} "
                f"bytes, sha256={sidecar.sha256!r}"
            )
        return cls(content, sidecar, threads)

    def act(self, observation: ArrayLike) -> int | NDArray[Any]:
        """Choose the best action for one observation, as the environment gives it: without a batch.

        Observations of float policies may be of any float type. Returned is the index of the best
        value, the lowest of those that share it, or of several actions at once (MultiDiscrete) each
        one's, [n]; or for a continuous head the action itself, float32 [n], clipped to the action's
        bounds.

        Raises:
            QuarlError: The observation has another shape or type or is not finite, or the head is
                not finite.
        """
        head = self._forward(observation)
        if self._bounds is not None:
            low, high = self._bounds
            action: NDArray[np.float32] = np.minimum(np.maximum(self._decode(head), low), high)
            return action
        if self._several:
            return self._best_of_several(head, head)
        # Codes are in the order of the values they stand for, so there is nothing to dequantise;
        # and for a handful of actions a list is faster than NumPy.
        values: list[float] = head.tolist()
        best = max(values)
        if values.count(best) > 1:
            self.ties += 1
        return values.index(best)

    def sample(self, observation: ArrayLike, random: np.random.Generator) -> int | NDArray[Any]:
        """Draw an action for one observation from the policy's distribution.

        It is an index, drawn from the softmax of the logits; or for a continuous head an action
        drawn from the normal distribution around it, float32 [n], clipped to the action's bounds.
        What is taken from `random` does not depend on the head: policies given generators of one
        seed meet the same noise.

        Raises:
            UsageError: The head belongs to no distribution.
            QuarlError: As `act`.
        """
        noise = self._noise(random)
        head = self._forward(observation)
        noisy = self._decode(head) + noise
        if self._bounds is not None:
            action: NDArray[np.float32] = np.clip(noisy, *self._bounds)
            return action
        if self._several:
            return self._best_of_several(head, noisy)
        values: list[float] = head.tolist()
        self.ties += values.count(max(values)) > 1
        return int(noisy.argmax())

    def _best_of_several(self, head: NDArray[Any], noisy: NDArray[Any]) -> NDArray[Any]:
        each = [values.tolist() for values in actions.split(head, self._several)]
        self.ties += any(values.count(max(values)) > 1 for values in each)
        return actions.best(noisy, self._several)

    def head(self, observation: ArrayLike) -> NDArray[np.float32]:
        """Return the head for one observation, dequantised: float32 [n]; errors as of `act`."""
        return self._decode(self._forward(observation))

    def _forward(self, observation: ArrayLike) -> NDArray[Any]:
        """Return the head for one observation as the file stores it: [n]."""
        if (
            type(observation) is np.ndarray
            and observation.dtype is self._dtype
            and observation.shape == self._shape
        ):
            admitted: NDArray[Any] = observation
        else:
            admitted = self._admit(observation)
        # A sum of squares is finite unless something in it is not, or is beyond 1e19: one quick
        # look is enough nearly always. Bytes are always finite.
        if self._may_be_infinite and not math.isfinite(np.vdot(admitted, admitted)):
            self._check_finite(admitted)
        self._encode(admitted)
        interpreter = self._interpreter
        interpreter.set_tensor(self._input_index, self._input)
        interpreter.invoke()
        head: NDArray[Any] = interpreter.get_tensor(self._output_index)[0]
        if not math.isfinite(head.dot(head)) and not np.isfinite(head).all():
            raise QuarlError(
                "The network's output is not finite: it diverged or overflows on this "
                f"observation; train it again. Received: scheme={self.sidecar.scheme!r}, "
                f"head={head.tolist()}"
            )
        return head

    def _admit(self, observation: ArrayLike) -> NDArray[Any]:
        """Convert what is harmless to convert, refuse the rest."""
        try:
            array = np.asarray(observation)
        except ValueError:
            raise self._refusal("something ragged") from None
        # Any float type is a float observation. Integers are refused: they are more likely a frame
        # or a state's number than an observation that happens to be whole.
        same_kind = array.dtype == self._dtype or (array.dtype.kind == self._dtype.kind == "f")
        if not same_kind or array.shape != self._shape:
            raise self._refusal(f"shape={array.shape}, dtype={array.dtype}")
        with np.errstate(over="ignore"):  # Beyond float32 becomes infinite, and is refused so.
            return array.astype(self._dtype)

    def _refusal(self, received: str) -> QuarlError:
        return QuarlError(
            f"A policy for {self.sidecar.env_id} takes one {self._dtype} observation of shape "
            f"{self._shape}, without a batch dimension. Received: {received}"
        )

    def _check_finite(self, observation: NDArray[Any]) -> None:
        bad = np.argwhere(~np.isfinite(observation))
        if bad.size:
            index = tuple(bad[0].tolist())
            raise QuarlError(
                f"{len(bad)} of the observation's {observation.size} numbers are not finite; check "
                f"the environment or the sensor. Received: observation{list(index)}="
                f"{observation[index]}"
            )

    def _decode(self, head: NDArray[Any]) -> NDArray[np.float32]:
        values: NDArray[np.float32] = head.astype(np.float32)
        if self._scale:
            values = (values - np.float32(self._zero_point)) * np.float32(self._scale)
        return values


def percentiles(durations: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Return the "median", "p95" and "p99" of durations [n]."""
    values = np.percentile(durations, [50, 95, 99]).tolist()
    return dict(zip(("median", "p95", "p99"), values, strict=True))


def time_calls(
    policy: Policy,
    observations: Sequence[NDArray[Any]],
    calls: int = 2000,
    random: np.random.Generator | None = None,
) -> NDArray[np.float64]:
    """Return the microseconds of single calls [calls], of `sample` where there is a generator.

    Observations are taken in turn, after a warm-up; ties that are met do not count.
    """
    act: Callable[[NDArray[Any]], Any] = policy.act
    if random is not None:
        act = partial(policy.sample, random=random)
    clock, ties = time.perf_counter_ns, policy.ties
    for observation in islice(cycle(observations), _WARM_UP_CALLS):
        act(observation)
    durations = []
    for observation in islice(cycle(observations), calls):
        start = clock()
        act(observation)
        durations.append(clock() - start)
    policy.ties = ties
    return np.array(durations) / 1000


def _interface(interpreter: Interpreter, sidecar: Sidecar) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the details of the one input and the one output, once they are the sidecar's."""
    if sidecar.head not in HEADS:
        raise unknown("head", sidecar.head, HEADS)
    if sidecar.observation_dtype not in _OBSERVATION_DTYPES:
        raise unknown("observation dtype", sidecar.observation_dtype, _OBSERVATION_DTYPES)
    inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()
    size = _head_size(sidecar)
    expected = [[1, *sidecar.observation_shape]], [[1, size]]
    found = [i["shape"].tolist() for i in inputs], [o["shape"].tolist() for o in outputs]
    if found != expected:
        raise QuarlError(
            "The flatbuffer is not the policy its sidecar describes; export it again. "
            f"Received: input shapes {found[0]}, expected {expected[0]}; "
            f"output shapes {found[1]}, expected {expected[1]}"
        )
    for detail in (*inputs, *outputs):
        dtype = np.dtype(detail["dtype"])
        raw = detail is inputs[0] and dtype == np.uint8 and sidecar.observation_dtype == "uint8"
        if not (dtype == np.float32 or raw or (dtype.kind in "iu" and detail["quantization"][0])):
            raise QuarlError(
                "Inputs and outputs must be float32, or integers with a scale; export the policy "
                f"again. Received: {detail['name']} of type {dtype}"
            )
    return inputs[0], outputs[0]


def _head_size(sidecar: Sidecar) -> int:
    """Return the number of values of the head, once the sidecar agrees with itself."""
    bounds = sidecar.action_low, sidecar.action_high
    if sidecar.head == "action" and None not in bounds and sidecar.num_actions is None:
        return len(sidecar.action_low or ())
    if sidecar.head != "action" and bounds == (None, None) and sidecar.num_actions is not None:
        return int(np.sum(sidecar.num_actions))
    raise QuarlError(
        "The sidecar's head does not fit its actions; export the policy again. Received: "
        f"head={sidecar.head!r}, num_actions={sidecar.num_actions}, bounds={bounds}"
    )


def _noise(sidecar: Sidecar) -> Callable[[np.random.Generator], NDArray[Any]]:
    """Build what draws the noise that, added to the head, makes its best value a sample."""
    size = _head_size(sidecar)
    if sidecar.head == "logits":
        # The largest of logits with Gumbel noise is distributed as their softmax.
        return lambda random: random.gumbel(size=size)
    if sidecar.action_std is not None:
        std = np.array(sidecar.action_std, np.float32)
        return lambda random: std * random.standard_normal(size, np.float32)

    def refuse(random: np.random.Generator) -> NDArray[Any]:
        raise UsageError(
            "This policy is no distribution to sample actions from; leave out --sample. Received: "
            f"run_id={sidecar.run_id!r}, head={sidecar.head!r}, action_std=None"
        )

    return refuse


def _encoder(
    row: NDArray[Any], observation_dtype: np.dtype[Any], scale: float, zero_point: int
) -> Callable[[NDArray[Any]], None]:
    """Build what writes an observation into `row` as the file wants it.

    The row is the input without its batch. An integer input has a scale, 0 if it is not quantised,
    and the code that stands for 0.
    """

    def copy(observation: NDArray[Any]) -> None:
        row[...] = observation

    same_bytes = row.dtype == observation_dtype and (scale, zero_point) == (1, 0)
    if row.dtype.kind == "f" or scale == 0 or same_bytes:
        return copy
    # Scalars are made once: making them costs as much as computing with them.
    step, zero = np.float32(scale), np.float32(zero_point)
    low, high = (
        (np.float32(code) - zero) * step
        for code in (np.iinfo(row.dtype).min, np.iinfo(row.dtype).max)
    )

    def quantize(observation: NDArray[Any]) -> None:
        # Clipped before it is divided, so that no observation overflows.
        row[...] = np.rint(np.minimum(np.maximum(observation, low), high) / step) + zero

    if observation_dtype.kind == "f":
        return quantize
    codes = (np.rint(np.clip(np.arange(256), low, high) / step) + zero).astype(row.dtype)

    def look_up(observation: NDArray[Any]) -> None:
        # "clip" writes straight into the row; no byte is beyond the table.
        np.take(codes, observation, out=row, mode="clip")

    return look_up
