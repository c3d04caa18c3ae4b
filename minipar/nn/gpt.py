"""A GPT-2 style language model. It knows nothing of ranks: `minipar.parallel` rewrites it."""

import math
from dataclasses import dataclass

import numpy as np

from minipar import rng
from minipar.arrays import array_module
from minipar.autograd import functional as F
from minipar.errors import ShapeError
from minipar.nn.layers import MLP, CausalSelfAttention, Dropout, Embedding, LayerNorm
from minipar.nn.module import Layer, Module, Parameter


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. `context` is the longest sequence, in tokens; `seed` determines the initial weights.

    tied: whether the head's weight is the token embedding's.
    """

    vocab_size: int = 256
    context: int = 128
    width: int = 256
    layers: int = 4
    heads: int = 8
    dropout: float = 0.0
    dtype: str = "float32"
    seed: int = 0
    tied: bool = True

    def __post_init__(self):
        if self.width % self.heads:
            allowed = [h for h in range(1, self.width + 1) if not self.width % h]
            raise ShapeError(f"width {self.width} does not divide into {self.heads} heads; allowed are {allowed}.")
        if not 0 <= self.dropout <= 0.9999:
            raise ShapeError(f"dropout is a probability from 0 to 0.9999, not {self.dropout}.")

    @property
    def multiplications(self):
        """Multiplications in the matrix products for each token, forward: 12 h^2 + 2 s h a layer, V h in the head."""
        h = self.width
        return self.layers * (12 * h * h + 2 * self.context * h) + self.vocab_size * h


class Block(Module):
    """One transformer layer, pre-normalised: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config):
        width, dtype = config.width, config.dtype
        self.ln1 = LayerNorm(width, dtype)
        self.attn = CausalSelfAttention(width, config.heads, config.dropout, dtype)
        self.drop1 = Dropout(config.dropout)
        self.ln2 = LayerNorm(width, dtype)
        self.mlp = MLP(width, 4 * width, dtype)
        self.drop2 = Dropout(config.dropout)

    def forward(self, x):  # x (batch, time, width)
        x = x + self.drop1(self.attn(self.ln1(x)))
        return x + self.drop2(self.mlp(self.ln2(x)))


class Head(Module):
    """Scores of every vocabulary entry: x @ weight^T with weight (vocabulary, width), the embedding's or another."""

    def __init__(self, weight):
        self.weight = weight

    def forward(self, x):
        return F.linear(x, self.weight.T, None)

    def loss(self, x, targets):
        return F.cross_entropy(self(x), targets)


class GPT(Module):
    """The model of Radford et al. 2019. Initial weights depend on config.seed and each parameter's name alone."""

    def __init__(self, config):
        self.config = config
        self.wte = Embedding(config.vocab_size, config.width, config.dtype)
        self.wpe = Embedding(config.context, config.width, config.dtype)
        self.drop = Dropout(config.dropout)
        self.blocks = [Block(config) for _ in range(config.layers)]
        self.ln_f = LayerNorm(config.width, config.dtype)
        self.head = Head(self.wte.weight if config.tied else Parameter(np.zeros_like(self.wte.weight.data)))
        self.assign_names()
        self._initialise()

    def _initialise(self):
        """Normal with deviation 0.02; 0.02 / sqrt(2 layers) where a branch is added to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = 0.02 / math.sqrt(2 * self.config.layers) if name.endswith("proj.weight") else 0.02
                values = rng.normal(parameter.shape, np.float64, self.config.seed, "init", name) * scale
                parameter.data = values.astype(self.config.dtype)

    def embed(self, tokens):
        """(batch, time) integer tokens -> (batch, time, width): what each token is and where it stands."""
        if tokens.ndim != 2:
            raise ShapeError(f"tokens must be (batch, time), not of shape {tokens.shape}.")
        time = tokens.shape[1]
        if time > self.config.context:
            raise ShapeError(
                f"a sequence of {time} tokens is longer than the model's context of {self.config.context}."
            )
        xp = array_module(self.wpe.weight.data)
        return self.drop(self.wte(xp.asarray(tokens)) + self.wpe(xp.arange(time)))

    def hidden(self, tokens):
        """(batch, time) integer tokens -> (batch, time, width) activations before the head."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.ln_f(x)

    def layers(self):
        """What `loss` does, as a chain of Layers: the embeddings, each block, and the head with the loss."""
        each = (self.config.multiplications - self.config.vocab_size * self.config.width) / max(1, self.config.layers)
        head = self.config.vocab_size * self.config.width
        return [
            Layer(self.embed, (self.wte, self.wpe, self.drop), 0.0),
            *(Layer(block, (block,), each) for block in self.blocks),
            Layer(lambda x, targets: self.head.loss(self.ln_f(x), targets), (self.ln_f, self.head), head),
        ]

    def forward(self, tokens):
        """(batch, time) integer tokens -> (batch, time, vocab_size) logits of the token that follows each."""
        return self.head(self.hidden(tokens))

    def loss(self, tokens, targets):
        """Mean cross-entropy, in nats a token, of targets (batch, time); a target of -100 does not count."""
        return self.head.loss(self.hidden(tokens), targets)
