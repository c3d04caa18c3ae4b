"""Ordinary model code: it knows nothing of ranks."""

from minipar.nn.gpt import GPT, Block, GPTConfig, Head
from minipar.nn.layers import MLP, CausalSelfAttention, Dropout, Embedding, LayerNorm, Linear
from minipar.nn.module import Buffer, Layer, Module, Parameter

__all__ = [
    "GPT",
    "MLP",
    "Block",
    "Buffer",
    "CausalSelfAttention",
    "Dropout",
    "Embedding",
    "GPTConfig",
    "Head",
    "Layer",
    "LayerNorm",
    "Linear",
    "Module",
    "Parameter",
]
