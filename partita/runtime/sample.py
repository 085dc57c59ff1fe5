"""A sample of what a byte-level model learned."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

PROMPT = "def "
LENGTH = 240  # bytes
TEMPERATURE = 0.7


@torch.no_grad()
def sample(
    make: Callable[[], nn.Module], state: Mapping[str, Tensor], sequence: int, *, prompt: str = PROMPT, length: int = LENGTH
) -> str:
    """Text continued from a prompt, byte by byte, with a fixed seed.

    Args:
        make: Builds the module: tokens (1, T) -> logits (1, T, vocab).
        state: Its trained state.
        sequence: Tokens the model can look back on.
        prompt, length: What it begins with, and how many bytes follow.
    """
    module = make()
    module.load_state_dict(dict(state), strict=False)
    module.eval()
    generator = torch.Generator().manual_seed(0)
    tokens = list(prompt.encode())
    with _one_thread():
        for _ in range(length):
            logits = module(torch.tensor([tokens[-sequence:]]))[0, -1, :256].float()
            tokens.append(int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)))
    return bytes(tokens).decode(errors="replace")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Ops on one token are short: threads that wait for each other at every op cost far more than they save on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
