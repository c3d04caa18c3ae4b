"""The same GPT and training step in plain eager PyTorch, to be measured against. Imported only where asked for."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class TorchGPT(nn.Module):
    """nn.GPT's twin: pre-normalised, learned positions, head tied to the token embedding."""

    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def torch_step(config, tokens, targets, parallel=False):
    """A function that does one training step with AdamW on one thread; parallel: of DistributedDataParallel."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = TorchGPT(config)
    if parallel:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, targets = torch.tensor(tokens), torch.tensor(targets)

    def run():
        optimizer.zero_grad()
        model(tokens, targets).backward()
        optimizer.step()

    return run


class TorchStage(nn.Module):
    """The part of a TorchGPT from block `first` to `last`; the head has a weight of its own."""

    def __init__(self, model, config, first, last):
        super().__init__()
        self.start, self.end = first == 0, last == config.layers
        self.blocks = model.blocks[first:last]
        if self.start:
            self.wte, self.wpe = model.wte, model.wpe
        if self.end:
            self.ln_f, self.head = model.ln_f, nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, x):
        if self.start:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x)) if self.end else x


def torch_pipeline_step(config, tokens, targets, microbatches):
    """A function that does one training step of torch.distributed.pipelining's 1F1B with AdamW on one thread a rank."""
    from torch.distributed import get_rank, get_world_size
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, size = get_rank(), get_world_size()
    cuts = [config.layers * r // size for r in range(size + 1)]
    model = TorchStage(TorchGPT(config), config, cuts[rank], cuts[rank + 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, targets = torch.tensor(tokens), torch.tensor(targets)
    loss = lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # noqa: E731
    schedule = Schedule1F1B(PipelineStage(model, rank, size, torch.device("cpu")), microbatches, loss)

    def run():
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets) if rank == size - 1 else schedule.step()
        optimizer.step()

    return run
