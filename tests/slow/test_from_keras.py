"""Policies of Keras are adopted: files of Keras 3 and 2 in safe mode, a SavedModel if trusted."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from samples import Capsys, python, refusal

from quarl_tf.cli import main
from quarl_tf.runtime.policy import Policy

OPTIONS = ("--env", "CartPole-v1", "--head", "logits", "--episodes", "1", "--name")

#: With Keras 2 or 3: a policy, the constants of its layers, and models that are no policies.
_SAVE = """
import os, sys
os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": "1"}
import numpy as np
if sys.argv[1] == "2":
    import tf_keras as keras
else:
    import keras
layers = keras.layers

def save(name, *middle, outputs=1, features=4):
    inputs = keras.Input((features,))
    hidden = layers.Dense(8, "tanh")(inputs)
    for layer in middle:
        hidden = layer(hidden)
    heads = [layers.Dense(2)(hidden) for _ in range(outputs)]
    model = keras.Model(inputs, heads if outputs > 1 else heads[0])
    model.save(name)
    return model

model = save(f"of_{sys.argv[1]}.h5", layers.Dropout(0.5))
np.savez(f"of_{sys.argv[1]}.npz", *model.get_weights())
if sys.argv[1] == "3":
    model.save("of_3.keras")
    model.export("program", verbose=False)
    for name in ("lambda.keras", "lambda.h5"):
        save(name, layers.Lambda(lambda x: 2 * x))
    save("several.keras", outputs=2)
    save("wide.keras", features=5)
    with open("of_3.keras", "rb") as sound, open("damaged.keras", "wb") as damaged:
        damaged.write(sound.read()[:-500])
"""


@pytest.fixture(scope="module")
def models(kept_pool: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder of Keras's files; whatever is adopted from them is in one process."""
    folder = tmp_path_factory.mktemp("keras")
    for version in "32":
        python("-c", _SAVE, version, cwd=folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.mark.parametrize("file", ["of_3.keras", "of_3.h5", "of_2.h5", "program"])
def test_a_model_of_keras_becomes_a_run(models: Path, file: str) -> None:
    name = file.replace(".", "_")
    assert main(["adopt", file, *OPTIONS, name, "--trust", "--schemes", "int8"]) == 0
    policy = Policy.load(f"tflite_models/CartPole-v1/adopted/s0-{name}/fp32.tflite")
    with np.load(models / f"of_{2 if '2' in file else 3}.npz") as constants:
        hidden_kernel, hidden_bias, head_kernel, head_bias = constants.values()
    for observation in np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32):
        expected = np.tanh(observation @ hidden_kernel + hidden_bias) @ head_kernel + head_bias
        np.testing.assert_allclose(policy.head(observation), expected, rtol=1e-5, atol=1e-6)
    assert main(["adopt", file, *OPTIONS, name, "--trust"]) == 0  # Again the same file.


@pytest.mark.parametrize(
    ("file", "code", "message"),
    [
        ("lambda.keras", 1, "`Lambda` layer"),
        ("lambda.h5", 1, "`Lambda` layer"),
        ("damaged.keras", 1, "damaged.keras is truncated or not a .keras file"),
        ("wide.keras", 1, "expected shape=(None, 5), found shape=(1, 4)\n"),
        ("several.keras", 2, "one output, float32 [1, 2]. Received: input float32 [1, 4]; output"),
        ("program", 2, "give --trust if you trust it. Received: program"),
        ("program/variables", 2, "without a saved_model.pb"),
    ],
)
@pytest.mark.usefixtures("models")
def test_other_files_are_refused(capsys: Capsys, file: str, code: int, message: str) -> None:
    line = refusal(capsys, "adopt", file, *OPTIONS, "none", code=code)
    assert message in line
    assert "safe_mode" not in line  # No command has it.
    assert not Path("tflite_models/CartPole-v1/adopted/s0-none").exists()
