"""The decoder: its step is recorded once as a program of the kernel backend and run for every batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from pagefleet_kernels import ops
from pagefleet_kernels.backend import Backend, KVCache, Program
from pagefleet_kernels.errors import BackendUnavailable
from pagefleet_server import host_memory
from pagefleet_server.model_errors import ModelError
from pagefleet_server.models.fused.rope import cos_sin
from pagefleet_server.models.fused.sharding import Group
from pagefleet_server.models.fused.spec import DecoderSpec, RopeSpec
from pagefleet_server.models.fused.weights import DecoderWeights, LayerWeights, Norm
from pagefleet_server.models.layer_call import StepContext
from pagefleet_server.models.layer_spec import LayerSpec

MIN_ROWS = 64
"""Of a program's buffers; they grow to the largest step, by powers of two."""


@dataclass(slots=True)
class FusedDecoder:
    """A loaded model, see models.executor.Executor."""

    spec: DecoderSpec
    weights: DecoderWeights
    eos_token_ids: tuple[int, ...]
    """Ids that end a text."""
    dtype: torch.dtype
    device: torch.device
    num_positions: int
    """Rows of the rotary tables: positions are below it."""
    group: Group | None = None
    """The ranks that this one computes with; spec and weights are its part. None: it is alone."""
    executor: str = "fused"
    pooling: None = None
    _tables: dict[RopeSpec | None, torch.Tensor] = field(default_factory=dict)
    _recorded: "_Recorded | None" = None

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """By layer index."""
        return self.spec.layer_specs

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.spec.vocab_size

    @property
    def max_positions(self) -> int:
        """Tokens of one sequence at most."""
        return min(self.spec.max_positions, self.num_positions)

    @property
    def num_weight_bytes(self) -> int:
        """Of weights and rotary tables."""
        return self.weights.num_bytes + sum(table.nbytes for table in self._tables.values())

    def shallow(self) -> "FusedDecoder":
        """The first layer of each kind: they all compute in the same buffers."""
        first = {traits: index for index, traits in reversed(list(enumerate(self.spec.layers)))}
        kept = sorted(first.values())
        layers = tuple(self.spec.layers[index] for index in kept)
        weights = replace(self.weights, layers=tuple(self.weights.layers[index] for index in kept))
        return replace(self, spec=replace(self.spec, layers=layers), weights=weights, _recorded=None)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, context: StepContext, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """token_ids and positions int64 [T], logit_rows int64 [N] -> logits [N, vocab_size]."""
        rows = self.hidden(token_ids, positions, context).index_select(0, logit_rows)
        logits = self.weights.head(rows)
        if self.spec.logits_divisor != 1.0:
            logits = logits / self.spec.logits_divisor
        if self.spec.logits_softcap is not None:
            logits = torch.tanh(logits / self.spec.logits_softcap) * self.spec.logits_softcap
        return logits

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, context: StepContext) -> torch.Tensor:
        """token_ids and positions int64 [T] -> the last layer's states, normed, [T, H]; valid until the next call."""
        recorded = self._program_for(context, token_ids.shape[0])
        rows = token_ids.shape[0]
        states = recorded.states[:rows]
        _take_rows(self.weights.embedding, token_ids, states)
        if recorded.embedding_scale != 1.0:
            states *= recorded.embedding_scale
        recorded.program.run(context.batch, positions)
        return recorded.normed[:rows]

    def captured_state(self) -> object:
        """What the last step's program works on. A graph that has captured the step must keep it: the decoder lets go
        of it when it records another."""
        return self._recorded

    def _program_for(self, context: StepContext, rows: int) -> "_Recorded":
        recorded = self._recorded
        if recorded is None or recorded.caches is not context.caches or recorded.program.max_rows < rows:
            wanted = max(MIN_ROWS, 1 << (rows - 1).bit_length())
            recorded = _record(self, context.backend, context.caches, wanted)
            self._recorded = recorded
        return recorded

    def table(self, rope: RopeSpec | None) -> torch.Tensor:
        """float32 [positions, rotary width] of cosines and sines; width 0 for layers that do not turn."""
        if rope not in self._tables:
            table = torch.empty(self.num_positions, 0) if rope is None else self._new_table(rope)
            self._tables[rope] = table.to(self.device)
        return self._tables[rope]

    def _new_table(self, rope: RopeSpec) -> torch.Tensor:
        """Tables of long contexts are large, and are built on the host. Raises ModelError."""
        needed = self.num_positions * rope.rotary_dim * torch.float32.itemsize
        left = host_memory.limit_bytes() - host_memory.resident_bytes()
        if 2 * needed > left:
            raise ModelError(
                f"the rotary tables of {self.num_positions} positions take {needed} bytes, as many to be made, and "
                f"{max(0, left)} are left; lower --max-model-len"
            )
        return cos_sin(rope, self.num_positions)


@dataclass(frozen=True, slots=True)
class _Recorded:
    program: Program
    caches: Sequence[KVCache]
    states: torch.Tensor
    """[max_rows, H]: the embeddings go here."""
    normed: torch.Tensor
    """[max_rows, H]: the result."""
    embedding_scale: float


def _record(decoder: FusedDecoder, backend: Backend, caches: Sequence[KVCache], max_rows: int) -> _Recorded:
    """As the backend's own program, or, where it has none for this model, as one of torch and its ops."""
    dtype, device = decoder.dtype, decoder.device
    scale = decoder.spec.embedding_scale
    if decoder.spec.rounds_embedding_scale:
        scale = float(torch.tensor(scale).to(dtype))
    try:
        recorder = _Recorder(decoder, ops.new_program(backend, dtype=dtype, device=device, max_rows=max_rows))
        recorder.record(caches)
    except BackendUnavailable:
        plain = ops.new_program(backend, dtype=dtype, device=device, max_rows=max_rows, plain=True)
        recorder = _Recorder(decoder, plain)
        recorder.record(caches)
    return _Recorded(recorder.program, caches, recorder.states, recorder.normed, scale)


class _Recorder:
    """Writes the model down, op by op."""

    def __init__(self, decoder: FusedDecoder, program: Program) -> None:
        spec = decoder.spec
        self.program = program
        self._decoder, self._spec = decoder, spec
        self.states, self.normed = program.buffer(spec.hidden_size), program.buffer(spec.hidden_size)
        self._result, self._normed_result = program.buffer(spec.hidden_size), program.buffer(spec.hidden_size)
        self._qkv = program.buffer(spec.q_width + 2 * spec.kv_width)
        self._query, self._key = program.buffer(spec.q_width), program.buffer(spec.kv_width)
        self._turned, self._attended = program.buffer(spec.q_width), program.buffer(spec.q_width)
        self._mlp_in = program.buffer(spec.intermediate_size * (2 if spec.gated else 1))
        self._mlp_mid = program.buffer(spec.intermediate_size)

    def record(self, caches: Sequence[KVCache]) -> None:
        """The whole step: from `states` to `normed`."""
        result: torch.Tensor | None = None
        for index, (layer, cache) in enumerate(zip(self._decoder.weights.layers, caches, strict=True)):
            rows = self._norm(layer.attention_norm, result)
            self._attention(index, layer, rows, cache)
            result = self._post_norm(layer.attention_post_norm)
            rows = self._norm(layer.mlp_norm, result)
            self.program.linear(layer.mlp_in, rows, self._mlp_in)
            self.program.activate(self._mlp_in, self._mlp_mid, activation=self._spec.activation, gated=self._spec.gated)
            self.program.linear(layer.mlp_out, self._mlp_mid, self._result)
            self._sum_over_ranks()
            result = self._post_norm(layer.mlp_post_norm)
        self._norm(self._decoder.weights.final_norm, result)

    def _norm(self, norm: Norm | None, result: torch.Tensor | None) -> torch.Tensor:
        """Add the result to the states; the rows that the next linear reads: normed, or the states themselves."""
        spec = self._spec
        if norm is None:
            if result is not None:
                self.program.norm(result, self.states, None, None, x_scale=spec.residual_scale)
            return self.states
        first = result is None
        self.program.norm(
            self.states if result is None else result,
            None if first else self.states,
            self.normed,
            norm.weight,
            bias=norm.bias,
            epsilon=spec.epsilon,
            weight_offset=spec.norm_offset,
            centred=spec.centred_norm,
            x_scale=1.0 if first else spec.residual_scale,
        )
        return self.normed

    def _post_norm(self, norm: Norm | None) -> torch.Tensor:
        if norm is None:
            return self._result
        self._plain_norm(self._result, self._normed_result, norm.weight)
        return self._normed_result

    def _plain_norm(self, x: torch.Tensor, out: torch.Tensor, weight: torch.Tensor) -> None:
        spec = self._spec
        self.program.norm(x, None, out, weight, epsilon=spec.epsilon, weight_offset=spec.norm_offset)

    def _attention(self, index: int, layer: LayerWeights, rows: torch.Tensor, cache: KVCache) -> None:
        spec, traits = self._spec, self._spec.layers[index]
        self.program.linear(layer.qkv, rows, self._qkv)
        query, key, value = torch.split(self._qkv, [spec.q_width, spec.kv_width, spec.kv_width], dim=1)
        query_norm, key_norm = layer.query_norm, layer.key_norm
        if spec.width_norm and query_norm is not None and key_norm is not None:
            self._plain_norm(query, self._query, query_norm)
            self._plain_norm(key, self._key, key_norm)
            query, key, query_norm, key_norm = self._query, self._key, None, None
        self.program.rope_write_kv(
            _heads(query, spec.head_dim),
            _heads(key, spec.head_dim),
            _heads(value, spec.head_dim),
            cache,
            self._turned,
            cos_sin=self._decoder.table(traits.rope),
            query_norm=query_norm,
            key_norm=key_norm,
            epsilon=spec.epsilon,
            norm_offset=spec.norm_offset,
        )
        self.program.attention(
            _heads(self._turned, spec.head_dim),
            cache,
            self._attended,
            scale=spec.score_scale,
            sliding_window=traits.sliding_window,
            softcap=spec.score_softcap,
        )
        self.program.linear(layer.attention_out, self._attended, self._result)
        self._sum_over_ranks()

    def _sum_over_ranks(self) -> None:
        group, result = self._decoder.group, self._result
        if group is not None:
            self.program.call(lambda rows: group.sum(result[:rows]))


def _heads(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[R, heads * D] -> [R, heads, D]."""
    return rows.view(rows.shape[0], -1, head_dim)


def _take_rows(table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """out [R, H] = table[rows]. On the CPU without torch: its OpenMP threads would spin on the cores of the step's own
    threads for milliseconds after the copy, a tenth of a step of 100 tokens."""
    if table.device.type != "cpu":
        torch.index_select(table, 0, rows, out=out)
        return
    np.take(table.view(torch.uint8).numpy(), rows.numpy(), axis=0, out=out.view(torch.uint8).numpy())
