"""Whether a policy fits a microcontroller, run by TensorFlow Lite Micro or as C."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from quarl_tf.export import c_source
from quarl_tf.foundation.errors import QuarlError, UsageError, require_known
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.flatbuffer import byte_size
from quarl_tf.store.workspace import has_sidecar

#: Numeric operators with a kernel in TensorFlow Lite Micro.
_MICRO = """
ABS ADD ADD_N ARG_MAX ARG_MIN AVERAGE_POOL_2D BATCH_MATMUL BATCH_TO_SPACE_ND BROADCAST_ARGS
BROADCAST_TO CAST CEIL CONCATENATION CONV_2D COS CUMSUM DEPTHWISE_CONV_2D DEPTH_TO_SPACE
DEQUANTIZE DIV DYNAMIC_UPDATE_SLICE ELU EMBEDDING_LOOKUP EQUAL EXP EXPAND_DIMS FILL FLOOR
FLOOR_DIV FLOOR_MOD FULLY_CONNECTED GATHER GATHER_ND GREATER GREATER_EQUAL HARD_SWISH
L2_NORMALIZATION L2_POOL_2D LEAKY_RELU LESS LESS_EQUAL LOG LOGICAL_AND LOGICAL_NOT LOGICAL_OR
LOGISTIC LOG_SOFTMAX MAXIMUM MAX_POOL_2D MEAN MINIMUM MIRROR_PAD MUL NEG NOT_EQUAL PACK PAD
PADV2 PRELU QUANTIZE REDUCE_ALL REDUCE_MAX REDUCE_MIN RELU RELU6 RESHAPE RESIZE_BILINEAR
RESIZE_NEAREST_NEIGHBOR REVERSE_V2 ROUND RSQRT SELECT_V2 SHAPE SIN SLICE SOFTMAX
SPACE_TO_BATCH_ND SPACE_TO_DEPTH SPLIT SPLIT_V SQRT SQUARE SQUARED_DIFFERENCE SQUEEZE
STRIDED_SLICE SUB SUM SVDF TANH TRANSPOSE TRANSPOSE_CONV UNIDIRECTIONAL_SEQUENCE_LSTM UNPACK
ZEROS_LIKE
"""
_KERNELS = frozenset(_MICRO.split())

_ALIASES = {"pico": "rp2040", "pico2": "rp2350"}  #: Of boards, with the chip that names them.
_COPYING_CHIPS = ("AVR", "ESP8266", "RT1062")  #: Processors that copy constants to RAM.

#: Most bytes of RAM for data beside code, of chips where the rest is for other uses: a Teensy 4's
#: RAM2 has the heap.
_DATA_BYTES = {"RT1062": 480 << 10}

#: Most bytes of code of the C export: 1.3 kB, and 32-bit floats in software.
_CODE_BYTES = 4096


class Memory(NamedTuple):
    """Bytes of flash and of RAM."""

    flash: int
    ram: int


class Fit(NamedTuple):
    """Memory that one route onto a board takes and has, and the operators it lacks.

    `taken` is None where the policy cannot be written.
    """

    route: str
    taken: Memory | None
    there: Memory
    lacking: list[str]

    @property
    def holds(self) -> bool:
        """Whether the policy fits by this route."""
        if self.taken is None or self.lacking:
            return False
        return self.taken.flash <= self.there.flash and self.taken.ram <= self.there.ram


def fits(artifact: Path, name: str) -> list[Fit]:
    """Return how a flatbuffer fits a board by TensorFlow Lite Micro, and as C.

    The application itself is not counted. A `node` that runs TensorFlow Lite Micro measures its
    RAM; without one, or if it cannot run the file, RAM is estimated. Raises a QuarlError for an
    unknown board or a damaged flatbuffer, a ModuleNotFoundError without `mcufit`.
    """
    from mcufit.boards.yaml_repo import YamlBoardRepository

    boards = {board.id: board for board in YamlBoardRepository().list()}
    boards |= {alias: boards[chip] for alias, chip in _ALIASES.items()}
    require_known("board", name, boards)
    board = boards[name]
    limits = [size for chip, size in _DATA_BYTES.items() if chip in board.chip]
    memory = Memory(board.flash_bytes, min([board.usable_sram_bytes, *limits]))
    is_copying = any(chip in board.chip for chip in _COPYING_CHIPS)
    return [_by_micro(artifact, board, memory, is_copying), _as_c(artifact, memory, is_copying)]


def _by_micro(artifact: Path, board: Any, memory: Memory, is_copying: bool) -> Fit:
    from mcufit.analysis.fit_checker import FitChecker
    from mcufit.boards.yaml_repo import YamlBoardRepository
    from mcufit.estimation import greedy, measured, wasm
    from mcufit.parsing import base, tflite_parser

    try:
        model, boards = tflite_parser.TFLiteModelParser().parse(artifact), YamlBoardRepository()
    except base.ModelParseError as error:
        raise QuarlError(f"mcufit cannot read it; export it again. Received: {error}") from error
    try:
        method = "measured"
        report = FitChecker(wasm.WasmArenaEstimator("node"), boards).check(model, board)
    except measured.MeasurementUnavailableError:
        method = "estimated"
        report = FitChecker(greedy.GreedyLifetimeEstimator(), boards).check(model, board)
    ram = report.estimate.total_arena_bytes + is_copying * model.file_size_bytes
    needs = Memory(report.flash_needed_bytes, ram)
    return Fit(f"TensorFlow Lite Micro ({method})", needs, memory, _missing_operators(artifact))


def _missing_operators(artifact: Path) -> list[str]:
    """Return the operators without a kernel in TensorFlow Lite Micro, with their types."""
    missing = []
    for graph in flatbuffer.parsed(artifact):
        for operator in graph.operators:
            first, *others = [graph.tensors[i].dtype for i in operator.inputs] or [""]
            is_hybrid = first == "float32" and bool({"int8", "int4"} & {*others})
            is_packed = operator.name == "DEQUANTIZE" and first in ("float16", "int4")
            if operator.name not in _KERNELS or is_hybrid or is_packed:
                types = " by ".join(dict.fromkeys((first, *others[:1])))
                missing.append(f"{operator.name} of {types}")
    return list(dict.fromkeys(missing))


def _as_c(artifact: Path, memory: Memory, is_copying: bool) -> Fit:
    if not has_sidecar(artifact):
        return Fit("C", None, memory, ["a sidecar (quarl adopt)"])
    try:
        constants, buffers, _ = c_source.size(artifact)
    except UsageError as error:
        return Fit("C", None, memory, [str(error).partition("Received: ")[2]])
    audit = flatbuffer.audit(artifact)
    # The caller's arrays.
    array_bytes = [byte_size(t.dtype, math.prod(t.shape)) for t in (*audit.inputs, *audit.outputs)]
    ram = buffers + sum(array_bytes) + is_copying * constants
    return Fit("C", Memory(constants + _CODE_BYTES, ram), memory, [])
