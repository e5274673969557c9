"""Act from a flatbuffer, with NumPy and the LiteRT interpreter alone, as on a board."""

import hashlib
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quarl_tf.foundation import kinds, native_output
from quarl_tf.foundation.errors import QuarlError, UsageError, one_line
from quarl_tf.runtime import flatbuffer
from quarl_tf.spec import actions
from quarl_tf.store.records import Sidecar
from quarl_tf.store.workspace import has_sidecar, sidecar_path

try:
    from ai_edge_litert.interpreter import Interpreter
except ModuleNotFoundError:  # LiteRT's former name, on boards without a wheel of the new one.
    from tflite_runtime.interpreter import Interpreter


class Policy:
    """Actions from one flatbuffer, one call at a time: threads need a policy each.

    Attributes:
        sidecar: The flatbuffer's sidecar.
        ties: Calls of `act` and `sample` so far in which two or more actions shared the best value.
    """

    def __init__(self, content: bytes, sidecar: Sidecar, threads: int = 1) -> None:
        """Load verified bytes; a QuarlError where they do not match the sidecar.

        A UsageError for less than one thread.
        """
        kinds.COUNT.require("threads", threads)
        try:
            # The first one of a process prints its delegate.
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
        self._dtype = np.dtype(sidecar.observation_dtype)
        self._may_be_infinite = self._dtype.kind == "f"
        self._input = np.zeros(source["shape"], source["dtype"])
        self._input_index = source["index"]
        self._encode = _encoder(self._input[0], self._dtype, *source["quantization"])
        self._output_index, self._size = target["index"], int(target["shape"][1])
        self._scale, self._zero_point = target["quantization"]
        self._bounds: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None
        if sidecar.num_actions is None:
            low, high = sidecar.action_low, sidecar.action_high
            self._bounds = np.array(low, np.float32), np.array(high, np.float32)
        #: The number of discrete actions, or that of each of several choices; else 0.
        self._choices = sidecar.num_actions or 0
        self._several = isinstance(self._choices, list)
        self._std = np.array(sidecar.action_std or [], np.float32)

    @classmethod
    def load(cls, path: str | os.PathLike[str], threads: int = 1) -> Self:
        """Load a flatbuffer with its sidecar, to run in a number of threads.

        Raises:
            QuarlError: The file or its sidecar is missing or damaged, or they do not match.
        """
        path = Path(path)
        content, source = flatbuffer.read(path), sidecar_path(path)
        if not has_sidecar(path):
            raise QuarlError(
                f"{path} has no sidecar {source.name} beside it; copy both files, or adopt it "
                f"(quarl adopt) if it is of floats. Received: path={str(path)!r}"
            )
        sidecar = Sidecar.load(source)
        digest = hashlib.sha256(content).hexdigest()
        if digest != sidecar.sha256:
            raise QuarlError(
                f"{path} was changed or damaged after export; export it again. Received: "
                f"{len(content)} bytes, sha256={digest!r}; expected {sidecar.sha256!r}"
            )
        return cls(content, sidecar, threads)

    def act(self, observation: ArrayLike) -> int | NDArray[Any]:
        """Choose the best action for one observation, as the environment gives it: without a batch.

        Float observations may be of any float type. The action is the index of the best value, the
        lowest one of ties; for MultiDiscrete the index of each choice, [n]; for a continuous head
        the head itself, float32 [n], clipped to the bounds.

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
            return self._best(head, head)
        # Codes have the order of their values, so nothing is dequantised; for few actions a list is
        # faster than NumPy.
        values: list[float] = head.tolist()
        best = max(values)
        if values.count(best) > 1:
            self.ties += 1
        return values.index(best)

    def sample(self, observation: ArrayLike, random: np.random.Generator) -> int | NDArray[Any]:
        """Draw an action for one observation from the policy's distribution.

        It is an index from the softmax of the logits; for a continuous head an action from the
        normal distribution around it, float32 [n], clipped to the bounds. The numbers drawn from
        `random` do not depend on the head: generators of one seed give all policies the same noise.

        Raises:
            UsageError: The head is no distribution.
            QuarlError: As `act`.
        """
        noise = self._noise(random)
        head = self._forward(observation)
        noisy_head = self._decode(head) + noise
        if self._bounds is not None:
            action: NDArray[np.float32] = np.clip(noisy_head, *self._bounds)
            return action
        best = self._best(head, noisy_head)
        return best if self._several else int(best)

    def _best(self, head: NDArray[Any], noisy_head: NDArray[Any]) -> NDArray[Any]:
        parts = [values.tolist() for values in actions.split(head, self._choices)]
        self.ties += any(values.count(max(values)) > 1 for values in parts)
        return actions.best(noisy_head, self._choices)

    def _noise(self, random: np.random.Generator) -> NDArray[Any]:
        """Draw the noise that, added to the head, makes its best value a sample."""
        if not isinstance(random, np.random.Generator):
            raise UsageError(
                "Actions are drawn by a generator, as numpy.random.default_rng(0). "
                f"Received: random={random!r}"
            )
        if self.sidecar.head == "logits":
            # The largest of logits with Gumbel noise is distributed as their softmax.
            return random.gumbel(size=self._size)
        if self.sidecar.action_std is not None:
            return self._std * random.standard_normal(self._size, np.float32)
        raise UsageError(
            "This policy is no distribution to sample actions from; take its best ones (`act`, or "
            "without --sample). Received: "
            f"run_id={self.sidecar.run_id!r}, head={self.sidecar.head!r}, action_std=None"
        )

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
            array: NDArray[Any] = observation
        else:
            array = self._admit(observation)
        # The sum of squares of finite numbers is finite up to about 1e19: a quick first check.
        if self._may_be_infinite and not math.isfinite(np.vdot(array, array)):
            infinite = np.argwhere(~np.isfinite(array))
            if infinite.size:
                index = tuple(infinite[0].tolist())
                raise QuarlError(
                    f"{len(infinite)} of the observation's {array.size} numbers are not finite. "
                    f"Received: observation{list(index)}={array[index]}"
                )
        self._encode(array)
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
        """Convert an observation of another type; a QuarlError where it may be a mistake."""
        try:
            array = np.asarray(observation)
        except ValueError:
            raise self._refusal("something ragged") from None
        # Integers are refused: they are more likely a frame or the number of a state.
        same_kind = array.dtype == self._dtype or (array.dtype.kind == self._dtype.kind == "f")
        if not same_kind or array.shape != self._shape:
            raise self._refusal(f"shape={array.shape}, dtype={array.dtype}")
        with np.errstate(over="ignore"):  # Numbers beyond float32 become infinite and are refused.
            return array.astype(self._dtype)

    def _refusal(self, received: str) -> QuarlError:
        return QuarlError(
            f"A policy for {self.sidecar.env_id} takes one {self._dtype} observation of shape "
            f"{self._shape}, without a batch dimension. Received: {received}"
        )

    def _decode(self, head: NDArray[Any]) -> NDArray[np.float32]:
        values: NDArray[np.float32] = head.astype(np.float32)
        if self._scale:
            values = (values - np.float32(self._zero_point)) * np.float32(self._scale)
        return values


def _interface(interpreter: Interpreter, sidecar: Sidecar) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the details of the input and the output; a QuarlError where they do not match."""
    inputs, outputs = interpreter.get_input_details(), interpreter.get_output_details()
    choices = sidecar.num_actions
    head_size = len(sidecar.action_low or ()) if choices is None else int(np.sum(choices))
    expected = [[1, *sidecar.observation_shape]], [[1, head_size]]
    received = [i["shape"].tolist() for i in inputs], [o["shape"].tolist() for o in outputs]
    if received != expected:
        raise QuarlError(
            "The flatbuffer is not the policy its sidecar describes; export it again. "
            f"Received: input shapes {received[0]}, expected {expected[0]}; "
            f"output shapes {received[1]}, expected {expected[1]}"
        )
    return inputs[0], outputs[0]


def _encoder(
    row: NDArray[Any], observation_dtype: np.dtype[Any], scale: float, zero_point: int
) -> Callable[[NDArray[Any]], object]:
    """Return a function that writes an observation into `row`, the file's input without its batch.

    The scale is 0 for an input that is not quantised; the zero point is the code of 0.
    """
    same_bytes = row.dtype == observation_dtype and (scale, zero_point) == (1, 0)
    if row.dtype.kind == "f" or scale == 0 or same_bytes:
        return partial(row.__setitem__, ...)
    # Making these scalars costs as much as computing with them.
    step, zero = np.float32(scale), np.float32(zero_point)
    ends = np.iinfo(row.dtype)
    low, high = ((np.float32(code) - zero) * step for code in (ends.min, ends.max))
    if observation_dtype.kind != "f":
        codes = (np.rint(np.clip(np.arange(256), low, high) / step) + zero).astype(row.dtype)
        # "clip" writes into the row without a copy; no byte is beyond the table.
        return partial(np.take, codes, out=row, mode="clip")

    def quantize(observation: NDArray[Any]) -> None:
        # Clipped before the division, which would overflow.
        row[...] = np.rint(np.minimum(np.maximum(observation, low), high) / step) + zero

    return quantize
