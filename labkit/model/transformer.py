"""A decoder-only transformer from top to bottom. Letters: b sequences of s tokens, h hidden, a heads of d, V words.

Sources: GPT: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.3. Llama: Touvron
et al., "LLaMA: Open and Efficient Foundation Language Models" (2023), section 2.2; Grattafiori et al., "The Llama 3
Herd of Models" (2024), section 3.2.
"""

from __future__ import annotations

import torch
from torch import nn

from labkit.model.attention import Attention, causal_mask
from labkit.model.config import Config
from labkit.model.dropout import Dropout
from labkit.model.mlp import GeluMLP, SwiGLU
from labkit.model.norm import RMSNorm
from labkit.model.rotary import Rotation, rotation


class Transformer(nn.Module):
    """Tokens in, a score for every possible next token out.

    Args:
        config: What it is made of.
        device: Where; ``"meta"`` holds shapes and no numbers, so that a model of any size can be looked at.
        dtype: Of all parameters and activations; default: torch's default.

    Example:
        >>> from labkit.model import preset
        >>> model = Transformer(preset("tiny_gpt"))
        >>> model(torch.zeros(2, 16, dtype=torch.int64)).shape
        torch.Size([2, 16, 256])
        >>> big = Transformer(preset("llama3_8b"), device="meta")
        >>> sum(p.numel() for p in big.parameters())
        8030261248
    """

    def __init__(
        self, config: Config, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        h, vocab = config.hidden, config.vocab
        self.token_embedding = nn.Embedding(vocab, h, device=device, dtype=dtype)
        if config.dialect == "gpt":
            self.position_embedding = nn.Embedding(config.positions, h, device=device, dtype=dtype)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, device, dtype) for _ in range(config.layers))
        self.norm = _norm(config, device, dtype)
        self.head = nn.Linear(h, vocab, bias=False, device=device, dtype=dtype)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        self.reset_parameters()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Score every possible next token after each token.

        Args:
            tokens: (b, s), each from 0 up to, but not, V.
            positions: Where each token stands in its sequence, (s,) for all sequences or (b, s); default 0 … s−1. A
                token sees those whose position is not above its own, in whichever order they come.

        Returns:
            Logits, (b, s, V).

        Raises:
            TypeError: Tokens or positions that are no whole numbers.
            ValueError: A wrong shape, or longer than `config.positions`; on a CPU also a token or a position out of
                range (a GPU would have to be waited for).
        """
        self._check(tokens, positions)
        x = self.embed(tokens, positions)  # (b, s, h)
        angles, mask = self.order(tokens.shape[1], positions)
        for block in self.blocks:
            x = block(x, angles, mask)  # (b, s, h)
        x = self.norm(x)  # (b, s, h)
        return self.head(x)  # (b, s, V)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """What enters the first layer, (b, s, h): each token's row, and in GPT its position's."""
        x = self.token_embedding(tokens)
        if self.config.dialect == "gpt":
            x = x + self.position_embedding(self._standing(tokens.shape[1], positions))
        return self.dropout(x)

    def order(self, length: int, positions: torch.Tensor | None) -> tuple[Rotation | None, torch.Tensor | None]:
        """What all layers ask of the positions: how far to turn (Llama), and who sees whom (None if in order)."""
        dtype = self.token_embedding.weight.dtype
        mask = None if positions is None else causal_mask(positions, dtype)
        if self.config.dialect == "gpt":
            return None, mask
        return rotation(self._standing(length, positions), self.config.head_size, dtype), mask

    def _standing(self, length: int, positions: torch.Tensor | None) -> torch.Tensor:
        if positions is not None:
            return positions
        return torch.arange(length, device=self.token_embedding.weight.device)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters anew, from torch's generator: after `to_empty`, or to start again from a seed.

        Normal with σ = 0.02; what adds to the residual stream, 2L times, σ = 0.02/√(2L), so that the stream does not
        grow with depth; biases 0, norms 1 (Radford et al. 2019, section 2.3).
        """
        for name, parameter in self.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            elif name.endswith(("output.weight", "down.weight")):
                parameter.normal_(std=0.02 * (2 * self.config.layers) ** -0.5)
            else:
                parameter.normal_(std=0.02)

    def _check(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> None:
        _whole_numbers("tokens", tokens, self.config.vocab, "config.vocab")
        if tokens.dim() != 2:
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}: expected (sequences, tokens); one: tokens[None]")
        longest = self.config.positions
        if positions is None:
            if tokens.shape[1] > longest:
                raise ValueError(f"tokens is {tokens.shape[1]} long: expected at most config.positions={longest}")
            return
        _whole_numbers("positions", positions, longest, "config.positions")
        if positions.shape not in (tokens.shape, tokens.shape[1:]):
            raise ValueError(
                f"positions has shape {tuple(positions.shape)}: expected {tuple(tokens.shape[1:])} for all sequences, "
                f"or {tuple(tokens.shape)}, as tokens"
            )


class Block(nn.Module):
    """One layer: attention, then an MLP; each reads the normalised stream and adds to the stream itself.

    Its parts are called `attention_norm`, `attention`, `mlp_norm`, `mlp` in both dialects.
    """

    def __init__(
        self, config: Config, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.attention_norm = _norm(config, device, dtype)
        self.attention = Attention(config, device, dtype)
        self.mlp_norm = _norm(config, device, dtype)
        self.mlp = (GeluMLP if config.dialect == "gpt" else SwiGLU)(config, device, dtype)
        self.dropout = Dropout(config.dropout)

    def forward(
        self, x: torch.Tensor, rotation: Rotation | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x: (b, s, h), in and out; `rotation` and `mask` as Attention takes them."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation, mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


def _norm(config: Config, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
    kind = nn.LayerNorm if config.dialect == "gpt" else RMSNorm
    return kind(config.hidden, eps=1e-5, device=device, dtype=dtype)


def _whole_numbers(name: str, value: torch.Tensor, limit: int, of: str) -> None:
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32):
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"{name} is {kind}: expected a tensor of whole numbers, torch.int64 or torch.int32")
    if value.is_cpu and value.numel():  # elsewhere, to look at values is to wait for the device
        low, high = (int(x) for x in value.aminmax())
        if low < 0 or high >= limit:
            raise ValueError(f"{name} holds {low if low < 0 else high}: expected 0 … {limit - 1}, below {of}={limit}")
