"""Many byte models in training at once: what each would learn alone, in a fraction of the time.

Small models leave a processor waiting for Python. Here each operation is done for all models
together, on parameters that lie beside each other; the models themselves see their own part.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

WINDOW, EMBED, HIDDEN = 8, 16, 64


class ByteModel(nn.Module):
    """Predicts a byte from the ``WINDOW`` before it: embeddings, a hidden layer, a head."""

    def __init__(self) -> None:
        """29,000 parameters."""
        super().__init__()
        self.embed, self.head = nn.Embedding(256, EMBED), nn.Linear(HIDDEN, 256)
        self.hidden = nn.Linear(WINDOW * EMBED, HIDDEN)

    def forward(self, windows: Tensor) -> Tensor:
        """Mean loss in bits a byte over windows of the shape ``(batch, WINDOW + 1)``."""
        x = self.embed(windows[:, :-1]).flatten(1)
        logits = self.head(functional.gelu(self.hidden(x), approximate="tanh"))
        return functional.cross_entropy(logits, windows[:, -1]) / math.log(2)


def draw(text: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """``size`` random windows of ``text``, of ``WINDOW + 1`` bytes each."""
    starts = torch.randint(len(text) - WINDOW, (size, 1), generator=generator)
    return text[starts + torch.arange(WINDOW + 1)].long()


class Stack:
    """Models whose parameters are parts of common tensors, and the optimizer of all of them."""

    def __init__(self, models: Sequence[ByteModel]) -> None:
        """Move the models' parameters into common memory."""
        self.common: dict[str, Tensor] = {}
        for name, _ in models[0].named_parameters():
            own = [model.get_parameter(name) for model in models]
            common = torch.stack([parameter.detach() for parameter in own])
            for parameter, part in zip(own, common, strict=True):
                parameter.data = part
            self.common[name] = common.requires_grad_()
        self.optimizer = torch.optim.AdamW(self.common.values(), betas=(0.9, 0.99), fused=True)

    def step(self, windows: Tensor, learning_rate: float) -> None:
        """An optimizer step of every model, on ``windows``: ``(models, batch, WINDOW + 1)``."""
        self.optimizer.zero_grad()
        self.losses(windows).sum().backward()
        clip([p.grad for p in self.common.values() if p.grad is not None], 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def losses(self, windows: Tensor) -> Tensor:
        """What ``ByteModel.forward`` gives, for each model its own."""
        models, batch, _ = windows.shape
        rows = windows[..., :-1] + 256 * torch.arange(models).view(-1, 1, 1)
        x = functional.embedding(rows, self.common["embed.weight"].flatten(0, 1)).flatten(2)
        x = functional.gelu(self._linear("hidden", x), approximate="tanh")
        logits = self._linear("head", x).flatten(0, 1)
        losses = functional.cross_entropy(logits, windows[..., -1].flatten(), reduction="none")
        return losses.view(models, batch).mean(dim=1) / math.log(2)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.common[name + ".weight"], self.common[name + ".bias"]
        return torch.baddbmm(bias[:, None], x, weight.mT)


class OneByOne:
    """The same for models of any kind, each computed by itself."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Their own optimizer, for all of them."""
        self.models = models
        parameters = [parameter for model in models for parameter in model.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.99), fused=True)

    def step(self, windows: Tensor, learning_rate: float) -> None:
        """An optimizer step of every model on its own windows."""
        self.optimizer.zero_grad()
        for model, own in zip(self.models, windows, strict=True):
            model(own).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()


def clip(gradients: Sequence[Tensor], norm: float) -> None:
    """Scale each model's gradient down to ``norm``, as ``clip_grad_norm_`` does for one model."""
    squares = torch.stack([g.flatten(1).square().sum(dim=1) for g in gradients])
    scale = (norm / (squares.sum(dim=0).sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
