"""The same numbers as PyTorch, where it is installed."""

import numpy as np
import pytest

from minipar import nn, optim
from minipar.autograd import Tensor
from minipar.autograd import functional as F

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
T = torch.nn.functional

TARGETS = np.array([[1, -100, 0], [3, 2, 2]])


def torch_attention(x):
    q, k, v = (x[:, :, :, i].transpose(1, 2) for i in range(3))
    return T.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


CASES = {
    "cross entropy": (
        lambda z: F.cross_entropy(z, TARGETS),
        lambda z: T.cross_entropy(z.reshape(-1, 4), torch.tensor(TARGETS).reshape(-1)),
        (2, 3, 4),
    ),
    "embedding": (
        lambda w: F.embedding(w, TARGETS % 5),
        lambda w: T.embedding(torch.tensor(TARGETS % 5), w),
        (5, 3),
    ),
    "attention": (lambda x: F.causal_attention(x, None), torch_attention, (2, 5, 3, 3, 4)),
    "exp, tanh": (lambda x: x.exp() - x.tanh(), lambda x: x.exp() - x.tanh(), (4, 5)),
    "log, sqrt": (lambda x: (x * x).sqrt().log(), lambda x: (x * x).sqrt().log(), (4, 5)),
    "pow, relu": (lambda x: x.relu() - x**3, lambda x: x.relu() - x**3, (4, 5)),
    "max": (lambda x: x.max(1) * x.max(), lambda x: x.amax(1) * x.amax(), (4, 5)),
    "concatenate": (lambda a, b: F.concatenate([a, b], -1), lambda a, b: torch.cat([a, b], -1), (2, 5), (2, 3)),
    "getitem": (lambda x: x[[0, 2, 0], 1:], lambda x: x[[0, 2, 0], 1:], (4, 5)),
    "where": (
        lambda a, b: F.where(np.eye(4, 5) > 0, a, b),
        lambda a, b: torch.where(torch.eye(4, 5) > 0, a, b),
        (4, 5),
        (5,),
    ),
    "gelu": (F.gelu, lambda x: T.gelu(x, approximate="tanh"), (4, 5)),
    "softmax": (F.softmax, lambda x: T.softmax(x, -1), (4, 5)),
    "layer norm": (F.layer_norm, lambda x, w, b: T.layer_norm(x, (5,), w, b), (4, 5), (5,), (5,)),
    "linear": (F.linear, lambda x, w, b: T.linear(x, w.T, b), (2, 3, 4), (4, 5), (5,)),
    "matmul": (lambda a, b: a @ b, lambda a, b: a @ b, (2, 3, 4), (4, 5)),
    "var": (lambda x: x.var(-1), lambda x: x.var(-1, correction=0), (4, 5)),
    "div": (lambda a, b: a / (b * b + 1), lambda a, b: a / (b * b + 1), (4, 5), (5,)),
}


@pytest.mark.parametrize("name", CASES)
def test_operations(name):
    ours, theirs, *shapes = CASES[name]
    arrays = [np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate(shapes)]
    a = [Tensor(x.copy(), requires_grad=True) for x in arrays]
    b = [torch.tensor(x, requires_grad=True) for x in arrays]
    y, z = ours(*a), theirs(*b)
    (y * y).sum().backward()
    (z * z).sum().backward()
    np.testing.assert_allclose(y.data, z.detach().numpy(), rtol=1e-12, atol=1e-14)
    for p, q in zip(a, b, strict=True):
        np.testing.assert_allclose(p.grad, q.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_gpt_trains_alike():
    """Loss, gradients and weights after AdamW steps, from the same initial weights, in float64."""
    from minipar.bench.torch_step import TorchGPT

    config = nn.GPTConfig(vocab_size=11, context=6, width=12, layers=2, heads=3, dtype="float64")
    ours, theirs = nn.GPT(config), TorchGPT(config).double()
    names = {"attn.qkv": "qkv", "attn.proj": "proj", "mlp.fc": "fc", "mlp.proj": "out"}
    twins = {}
    for name, parameter in ours.named_parameters():
        other = name
        for a, b in names.items():
            other = other.replace(a, b)
        twins[name] = dict(theirs.named_parameters())[other]
        with torch.no_grad():
            twins[name].copy_(torch.tensor(to_torch(name, parameter.data, config)))
    tokens = np.random.default_rng(0).integers(11, size=(2, 7))
    x, y = tokens[:, :-1], tokens[:, 1:]
    a = optim.AdamW(ours.parameters(), lr=1e-2)
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for _ in range(3):
        ours.zero_grad()
        b.zero_grad()
        loss, other = ours.loss(x, y), theirs(torch.tensor(x), torch.tensor(y))
        assert loss.item() == pytest.approx(other.item(), rel=1e-12)
        loss.backward()
        other.backward()
        for name, parameter in ours.named_parameters():
            if not name.endswith("qkv.bias"):  # a key's bias has no gradient but rounding, which Adam would enlarge
                expected = twins[name].grad.numpy()
                np.testing.assert_allclose(to_torch(name, parameter.grad, config), expected, rtol=1e-7, atol=1e-10)
        a.step()
        b.step()


def to_torch(name, array, config):
    """PyTorch keeps (outputs, inputs), and its twin orders qkv's outputs by q, k, v before heads."""
    if ".qkv." in name:
        depth = config.width // config.heads
        array = array.reshape(*array.shape[:-1], config.heads, 3, depth).swapaxes(-3, -2).reshape(array.shape)
    return np.ascontiguousarray(array.T) if array.ndim == 2 and name.startswith("blocks") else array
