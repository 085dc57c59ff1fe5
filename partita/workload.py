"""What is trained: a model, its batch, dtype and optimizer.

A model is described by a small frozen dataclass whose fields are the keys of `[workload]`. `runtime/models/` builds the module.
Token models (`gpt`, `llama`) take tokens (samples, sequence), int64; `resnet` takes images (samples, channels, size, size);
`mlp` takes vectors (samples, inputs).
"""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar


@dataclass(frozen=True)
class GPT:
    """A pre-norm decoder: learned positions, fused qkv, GELU, layer norm.

    Args:
        layers, hidden, heads, vocab, sequence: Sizes; heads must divide hidden.
        ffn: Width of the MLP; None means 4 x hidden.
        tie_embeddings: The head shares the token embedding's weight.
        dropout: After the embedding, attention and each branch.
    """

    kind: ClassVar[str] = "gpt"
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    vocab: int = 256
    sequence: int = 128
    ffn: int | None = None
    tie_embeddings: bool = False
    dropout: float = 0.0

    @property
    def width(self) -> int:
        """Width of the MLP."""
        return self.ffn or 4 * self.hidden


@dataclass(frozen=True)
class Llama:
    """A pre-norm decoder: rotary positions, grouped-query attention, SwiGLU, RMS norm, no biases.

    Args:
        kv_heads: Heads of keys and values; None means `heads`; must divide it.
        ffn: Width of the MLP; None means 4 x hidden.
        rope_theta: Base of the rotary frequencies.
    """

    kind: ClassVar[str] = "llama"
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int | None = None
    vocab: int = 256
    sequence: int = 128
    ffn: int | None = None
    tie_embeddings: bool = False
    dropout: float = 0.0
    rope_theta: float = 10000.0

    @property
    def width(self) -> int:
        """Width of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads


@dataclass(frozen=True)
class ResNet:
    """A residual network of basic blocks with batch norm (ResNet-18 has blocks 2, 2, 2, 2 and hidden 64).

    Args:
        layers: Basic blocks per stage; each stage after the first halves the image and doubles the channels.
        stages: Number of stages.
        hidden: Channels of the first stage.
        classes, channels, size: Outputs, input channels, side of the square image.
    """

    kind: ClassVar[str] = "resnet"
    layers: int = 2
    stages: int = 4
    hidden: int = 64
    classes: int = 10
    channels: int = 3
    size: int = 32


@dataclass(frozen=True)
class MLP:
    """Linear layers with GELU between them: inputs -> hidden x (layers - 1) -> outputs; cross-entropy over outputs."""

    kind: ClassVar[str] = "mlp"
    layers: int = 4
    inputs: int = 64
    hidden: int = 256
    outputs: int = 16


Model = GPT | Llama | ResNet | MLP
MODELS: dict[str, type[Model]] = {m.kind: m for m in (GPT, Llama, ResNet, MLP)}


@dataclass(frozen=True)
class Workload:
    """A model and how it is trained.

    Args:
        model: Catalogue name, ``hf:PATH/config.json`` or ``python:package.module:factory``, as the user wrote it.
        spec: The model's dataclass; None for `hf:` types outside the catalogue and for `python:`.
        batch: Samples per optimizer step, over all ranks.
        accumulate: Microbatches a step is divided into on every data rank.
        dtype: Of parameters and activations.
        master: dtype of the optimizer's copy; None means none.
        reduce_dtype: dtype gradients are summed in; None means `dtype`.
        clip: Largest global 2-norm of the gradient; None means no clipping.
        schedule: "constant" or "cosine", with `warmup` and `horizon` in steps.
        data: Absolute path of a text file or folder; None means the default of the model.
        extra: Keyword arguments of a `python:` factory.
    """

    model: str
    spec: Model | None = None
    batch: int = 32
    accumulate: int = 1
    dtype: str = "float32"
    master: str | None = None
    reduce_dtype: str | None = None
    optimizer: str = "adamw"
    learning_rate: float = 3e-4
    schedule: str = "constant"
    warmup: int = 0
    horizon: int | None = None
    clip: float | None = None
    seed: int = 0
    data: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def sequence(self) -> int | None:
        """Tokens per sample; None for models without tokens."""
        return getattr(self.spec, "sequence", None)

    def table(self) -> dict[str, Any]:
        """The [workload] table: the model's fields and its own, without what is left at its default."""
        spec = {f.name: getattr(self.spec, f.name) for f in fields(self.spec)} if self.spec else {}
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("model", "spec", "extra")}
        return {"model": self.model, **{k: v for k, v in (spec | own | self.extra).items() if v is not None}}
