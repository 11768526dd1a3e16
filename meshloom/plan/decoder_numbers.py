"""A decoder in numbers: the record that memory and time follow from.

Owns: what is said of a layer, and what follows from it. Refuses to know: config.json, families (``plan.parameters``), dtypes,
devices. Always holds: components add up to the total; nothing in it is as long as the list of layers.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer holds, and how wide it is for one token.

    Args:
        attention: matrices, biases and sinks of attention.
        norms: of attention's input and output, of the MLP's, of queries, keys and latents.
        mlp: of a dense MLP; 0 in a layer of experts.
        experts: of all routed experts.
        shared_experts: of experts that every token meets.
        router: that picks the experts of a token.
        experts_met: routed experts that a token meets.
        num_experts: routed experts there are.
        intermediate: values of the gate that one token makes, over all experts it meets.
    """

    attention: int
    norms: int
    mlp: int = 0
    experts: int = 0
    shared_experts: int = 0
    router: int = 0
    experts_met: int = 0
    num_experts: int = 0
    intermediate: int

    @property
    def total(self) -> int:
        return self.attention + self.norms + self.mlp + self.experts + self.shared_experts + self.router

    @property
    def active(self) -> int:
        """Parameters that one token meets."""
        return self.total - self.experts + (self.experts // self.num_experts * self.experts_met if self.experts else 0)

    @property
    def cut_by_tensor(self) -> int:
        """Parameters that tensor parallelism divides; norms and the router are on every device."""
        return self.attention + self.mlp + self.experts + self.shared_experts


@dataclass(frozen=True)
class Layers:
    """The layers of a model in order, kept as runs of equal ones: as small for a thousand as for one.

    Args:
        runs: each a layer, and how many of it follow each other.
    """

    runs: tuple[tuple[Layer, int], ...]

    @classmethod
    def of(cls, layers: Iterable[Layer]) -> "Layers":
        """The runs of these layers."""
        return cls(tuple((layer, sum(1 for _ in equal)) for layer, equal in groupby(layers)))

    def __len__(self) -> int:
        return sum(count for _, count in self.runs)

    def __iter__(self) -> Iterator[Layer]:
        return (layer for layer, count in self.runs for _ in range(count))

    def __getitem__(self, index: int) -> Layer:
        for layer, count in self.runs:
            if index < count:
                return layer
            index -= count
        raise IndexError(index)

    def between(self, start: int, stop: int) -> "Layers":
        """The layers of a stretch."""
        found, at = [], 0
        for layer, count in self.runs:
            if (inside := min(stop, at + count) - max(start, at)) > 0:
                found.append((layer, inside))
            at += count
        return Layers(tuple(found))

    def sum(self, number: Callable[[Layer], int]) -> int:
        """A number of each layer, added up."""
        return sum(count * number(layer) for layer, count in self.runs)


@dataclass(frozen=True, kw_only=True)
class DecoderNumbers:
    """A decoder in numbers: parameters by component, and the widths that memory and time follow from.

    Args:
        family: ``model_type`` of config.json.
        embedding: parameters of the embedding table.
        layers: of each layer, in order.
        final_norm: parameters of the last norm.
        head: parameters of the output head; 0 if it is the embedding table.
        further: parameters of layers that predict further tokens, which are no part of the model.
        hidden: width of the residual stream.
        vocabulary: rows of the head.
        num_heads: query heads.
        num_key_value_heads: heads of keys and values; 1 where a token's keys and values are one latent vector.
        query_width: heads × width of a query.
        value_width: heads × width of a value.
        key_value_width: heads × width, of the keys and of the values that a training pass computes.
        cached: values that the cache keeps of one token in one layer.
    """

    family: str
    embedding: int
    layers: Layers
    final_norm: int
    head: int
    further: int = 0
    hidden: int
    vocabulary: int
    num_heads: int
    num_key_value_heads: int
    query_width: int
    value_width: int
    key_value_width: int
    cached: int

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding table."""
        return not self.head

    @cached_property
    def total(self) -> int:
        """Parameters of the model as transformers loads it."""
        return self.embedding + self.layers.sum(lambda layer: layer.total) + self.final_norm + self.head

    @property
    def active(self) -> int:
        """Parameters that one token meets, tables included, as model cards count them."""
        return self.total - self.layers.sum(lambda layer: layer.total - layer.active)

    @cached_property
    def computed(self) -> int:
        """Parameters that one token is computed with, without the tables: layers and last norm."""
        return self.layers.sum(lambda layer: layer.active) + self.final_norm

    @property
    def head_matrix(self) -> int:
        """Values of the matrix that predicts, tied or not."""
        return self.vocabulary * self.hidden

    def with_scalar_head(self) -> "DecoderNumbers":
        """The same decoder with a head of one output, as critics and reward models have."""
        return replace(self, head=self.hidden + 1, vocabulary=1)

    def with_whole_cache(self) -> "DecoderNumbers":
        """The same decoder where keys and values of every head are cached, and not the latent vector that gives them, as the
        embedded engine does."""
        whole = 2 * self.key_value_width
        return self if self.cached >= whole else replace(self, cached=whole, num_key_value_heads=self.num_heads)

    def by_component(self) -> dict[str, int]:
        """Parameters of each component; they add up to ``total``."""
        parts = {"embedding": self.embedding}
        for name in ("attention", "mlp", "experts", "shared_experts", "router", "norms"):
            parts[name] = sum(count * getattr(layer, name) for layer, count in self.layers.runs)
        parts["norms"] += self.final_norm
        return parts | {"head": self.head}
