"""The backends of this package, by the contract that every backend passes."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import mlx.core as mx
import mlx.nn
import numpy as np
import torch
from torch import nn

from gradientmail.backend.base import Backend
from gradientmail.backend.mlx import MlxBackend
from gradientmail.backend.numpy import NumpyBackend
from gradientmail.backend.torch import TorchBackend
from gradientmail.testing.backend_contract import BackendContract
from gradientmail.testing.backend_parameters import Tensors
from gradientmail.testing.backend_values import Floats

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TestTorchBackend(BackendContract):
    def make_backend(self) -> Backend:
        return TorchBackend()

    def make_model(self, tensors: Tensors) -> Any:
        model = nn.Module()
        for name, (dtype, values) in tensors.items():
            tensor = torch.from_numpy(values.copy()).to(DTYPES[dtype])
            model.register_parameter(name, nn.Parameter(tensor))
        return model

    def read_model(self, model: Any) -> Mapping[str, Floats]:
        return {
            name: p.detach().float().numpy().astype(np.float32, copy=True)
            for name, p in model.named_parameters()
        }


class TestNumpyBackend(BackendContract):
    """Its models are dicts of arrays."""

    dtypes: Mapping[str, Any] = {
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
    }

    def make_backend(self) -> Backend:
        return NumpyBackend()

    def make_model(self, tensors: Tensors) -> Any:
        return {name: values.astype(self.dtypes[d]) for name, (d, values) in tensors.items()}

    def read_model(self, model: Any) -> Mapping[str, Floats]:
        return {name: array.astype(np.float32) for name, array in model.items()}


class TestMlxBackend(BackendContract):
    """Its arithmetic is NumPy's; its models are trees of modules."""

    dtypes: Mapping[str, Any] = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}

    def make_backend(self) -> Backend:
        return MlxBackend()

    def make_model(self, tensors: Tensors) -> Any:
        model = mlx.nn.Module()
        for name, (dtype, values) in tensors.items():
            setattr(
                model,
                name,
                mx.array(values.tolist()).reshape(values.shape).astype(self.dtypes[dtype]),
            )
        return model

    def read_model(self, model: Any) -> Mapping[str, Floats]:
        parameters = model.trainable_parameters()
        return {name: np.array(array.astype(mx.float32)) for name, array in parameters.items()}
