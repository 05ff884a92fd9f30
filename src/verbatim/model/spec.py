"""ModelSpec: a model architecture as data. Families differ in these fields, not in code.

model/decoder.py reads nothing else. Weights have internal names (model/loading/names.py maps the
names of each file format to them):

    embed, positions, final_norm[.bias], head
    mtp.embed_norm, mtp.state_norm, mtp.project    [hidden], [hidden], [hidden, 2 · hidden]
    assistant.out, assistant.centroids, assistant.ids    [target's hidden, hidden], [n, hidden], [V]
    dflash.fc, dflash.state_norm    [hidden, states], [hidden]
    layers.{i}.attn_norm[.bias]    layers.{i}.attn.{q,k,v,o}[.bias]
    layers.{i}.attn.{q_norm,k_norm,sinks}
    layers.{i}.attn_post_norm      layers.{i}.mlp_norm[.bias]    layers.{i}.mlp_post_norm
    layers.{i}.mlp.{gate,up,down}[.bias]
    layers.{i}.moe.router[.bias]   layers.{i}.moe.choice_bias
    layers.{i}.moe.{gate,up,down}[.bias]    stacked: [experts, out, in], biases [experts, out]
    layers.{i}.shared.{gate,up,down}[.bias]    layers.{i}.shared.scale    [1, hidden]
    layers.{i}.attn.gate           gate of the attention's output
    layers.{i}.conv.{in,out}[.bias]    layers.{i}.conv.kernel[.bias]    [channels, taps]
    layers.{i}.delta.{qkv,z,b,a,out}   layers.{i}.delta.kernel
    layers.{i}.delta.{decay,dt,norm}   [value heads], [value heads], [value head]
    layers.{i}.mlp_own_norm    layers.{i}.moe_norm    layers.{i}.moe_post_norm
    layers.{i}.router_norm     layers.{i}.moe.scales    [hidden], [experts]   (experts_beside)
    layer_inputs.{embed,project,norm}    [vocab, layers · width], [layers · width, hidden], [width]
    layers.{i}.input.{gate,project}    layers.{i}.input_norm    layers.{i}.scale    [1]

A linear weight is [out, in]. Rotary pairs are (j, j + d/2) of the rotated part of a head. The
loader reorders the rows of files whose pairs are (2j, 2j + 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from verbatim.base.records import CacheGroup


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions of one layer type: the angle of pair j at position p is p * inv_freq[j].

    All scalings (linear, dynamic, llama3, yarn, longrope) are resolved into `inv_freq` and
    `attention_factor` at load. The frequencies of longrope and dynamic depend on the engine's
    context, never on the length of a sequence, so cached keys stay valid while it grows."""

    dim: int  # rotated part of each head; the rest passes through
    inv_freq: tuple[float, ...]  # dim / 2 values, radians per position
    attention_factor: float = 1.0  # multiplies cos and sin


@dataclass(frozen=True, slots=True)
class LayerSpec:
    window: int | None = None  # sliding window: positions p-window+1 .. p are visible; None: all
    rope: RopeSpec | None = None  # None: no rotary positions (gpt2; some layers of smollm3)
    experts: int = 0  # 0: dense MLP
    # What mixes positions: attention, a short convolution (lfm2) or a gated delta net (qwen3_next).
    # Not in repr, which is part of every model's fingerprint.
    mixer: Literal["attention", "conv", "delta"] = field(default="attention", repr=False)
    head_dim: int = field(default=0, repr=False)  # 0: ModelSpec.head_dim
    kv_heads: int = field(default=0, repr=False)  # 0: ModelSpec.kv_heads
    mlp: int = field(default=0, repr=False)  # inner width of the dense MLP; 0: ModelSpec.mlp
    # The earlier layer whose keys and values this layer reads; None: it has its own.
    kv_layer: int | None = field(default=None, repr=False)
    value_is_key: bool = field(default=False, repr=False)  # values: the keys before norm and rope


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Sizes of gated delta nets. A value head has a state [key_dim, value_dim], in float32."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    # Value head j reads key head j % key_heads (GGUF's qwen35) instead of j // (values per key).
    tiled: bool = False

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def qkv(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values

    def key_head(self, value_head: int) -> int:
        """The key head that a value head reads."""
        if self.tiled:
            return value_head % self.key_heads
        return value_head * self.key_heads // self.value_heads


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """An EAGLE-3 head: a draft layer whose first attention reads, per position, the norm of the
    next token's embedding beside the norm of a state x: eagle.fc · the target's states, or its own
    output for the position before."""

    states: int  # width of the target's states: those of the captured layers, side by side
    vocab: int  # tokens that it drafts
    norm_first: bool  # the residual starts as the norm of x, not as x
    norm_states: bool = False  # a norm of the states before eagle.fc


@dataclass(frozen=True, slots=True)
class AssistantSpec:
    """A Gemma 4 assistant: its layers have queries only, and read the KV cache of the target: each
    that of the target's layer LayerSpec.kv_layer. The input is mtp.project · [the target's
    embedding of the last token; the target's final state of the position before, or
    assistant.out · the own final state]. Every draft of a chain is computed at one position."""

    target: ModelSpec
    # The head in clusters of equal size: tokens outside of the `used` clusters whose centroids
    # score highest are not drafted. 0: one head for all tokens.
    centroids: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class DFlashSpec:
    """A DFlash head: the layers fill a block of masks after the last token, with attention in both
    directions. Keys and values of the positions before are those of norm(dflash.fc · the target's
    states), in every layer."""

    states: int  # width of the target's states: those of the captured layers, side by side
    mask: int  # token id of a mask
    block: int  # positions of a block, the last token included


@dataclass(frozen=True, slots=True)
class DiffusionSpec:
    """How a model fills blocks of masked positions (docs/adr/0034)."""

    mask: int  # token id of an undecided position
    block: int  # positions of a block, where the request says nothing; 0: all of the canvas
    # Attention over the whole prompt and canvas; else over earlier blocks and the own one.
    full: bool = False
    shift: bool = False  # the logits of a row are of the next position
    # Finished tokens see no later ones, blocks begin behind the prompt, and the model also decodes
    # from left to right, which it does unless the request sets a parameter of diffusion.
    causal: bool = False
    remasking: str = "low_confidence_dynamic"  # where the request says nothing
    confidence: float = 0.85  # threshold of low_confidence_dynamic


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and options of one decoder-only transformer."""

    family: str  # llama, qwen2, gemma3, … (a file of model/families each)
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # inner width of the dense MLP; 0 if every layer is a mixture of experts
    context: int  # positions that the engine serves
    layers: tuple[LayerSpec, ...]
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # gemma multiplies by (1 + weight); GGUF files store the sum already
    norm_bias: bool = True  # layer norms only: they have a bias (cohere's have none)
    # swiglu_oai: min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (clamp(up, -7, 7) + 1)  (gpt_oss)
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"] = "silu"
    gated: bool = True  # down(act(gate(x)) * up(x)); False: down(act(up(x)))
    qkv_bias: bool = False
    out_bias: bool = False  # bias of the attention's output projection
    mlp_bias: bool = False
    # RMS norm of queries and keys. head: of each head before the rotation; rotated_head: of each
    # head after the rotation; width: of all heads together, before the rotation.
    qk_norm: Literal["", "head", "rotated_head", "width"] = ""
    pre_norms: bool = True  # norms before attention and before the MLP
    post_norms: bool = False  # norms after attention and after the MLP, before the addition
    # Attention and MLP read the same residual; x + attention(norm(x)) + mlp(norm(x)).
    parallel: bool = False
    shared_norm: bool = False  # with `parallel`: attn_norm is the norm of both
    residual_scale: float = 1.0  # multiplies the outputs of attention and MLP (granite)
    sinks: bool = False  # one more logit per head in the softmax of attention, without a value
    # Queries at position p are multiplied by 1 + beta * ln(1 + floor(p / length)); 0 is off.
    query_scale_beta: float = 0.0
    query_scale_length: int = 0
    learned_positions: bool = False  # gpt2
    tied: bool = False  # the output head is the embedding
    attention_scale: float = 0.0  # multiplies q·k; 0 means head_dim ** -0.5
    attention_softcap: float = 0.0  # cap * tanh(score / cap) before the mask; 0 is off
    logit_scale: float = 1.0  # multiplies the logits, before the softcap
    logit_softcap: float = 0.0  # cap * tanh(logit / cap); 0 is off
    embed_scale: float = 1.0  # gemma multiplies embeddings by sqrt(hidden)
    experts_used: int = 0  # experts per token
    expert_mlp: int = 0  # inner width of an expert
    experts_renormalised: bool = True  # weights of the chosen experts sum to 1
    router: Literal["softmax", "sigmoid"] = "softmax"  # turns router logits into expert weights
    router_bias: bool = False  # added to the router's logits
    choice_bias: bool = False  # added to the expert weights for the choice of experts only
    experts_scale: float = 1.0  # multiplies the weights of the chosen experts
    # Experts are chosen in the expert_groups_used groups (of adjacent experts) whose two best have
    # the largest sum.
    expert_groups: int = 1
    expert_groups_used: int = 1
    expert_bias: bool = False
    shared_mlp: int = 0  # inner width of an MLP that every token uses beside the experts; 0: none
    trained_positions: int = 0  # rows of `positions` (learned positions only)
    attention_gate: bool = False  # the attention's output is multiplied by sigmoid(attn.gate · h)
    shared_gate: bool = False  # the shared MLP's output is multiplied by sigmoid(shared.scale · h)
    conv_kernel: int = 0  # taps of the causal convolution of conv and delta layers
    conv_bias: bool = False  # biases of all matrices and of the kernel of conv layers
    delta: DeltaSpec | None = None  # sizes of the delta layers
    value_norm: bool = False  # RMS norm of each head of the values, without a weight
    # Each layer adds an input of its own per token: its part, this wide, of a second embedding and
    # of a projection of the first (gemma4). 0: none.
    layer_input: int = 0
    layer_scale: bool = False  # the residual is multiplied by layers.{i}.scale after each layer
    # Layers with experts have a dense MLP, too; each of the two has norms of its own (gemma4).
    experts_beside: bool = False
    # A draft layer (multi-token prediction): the input of its one layer is mtp.project · [norm of
    # the next token's embedding; norm of the target's final state].
    draft_layer: bool = False
    eagle: EagleSpec | None = None  # a draft layer of this kind
    assistant: AssistantSpec | None = None  # the same
    dflash: DFlashSpec | None = None  # the same
    diffusion: DiffusionSpec | None = None  # None: the model decodes from left to right only

    @property
    def draft_kind(self) -> str:
        """What a model that drafts for another is, for messages."""
        if self.assistant is not None:
            return "Gemma 4 assistants"
        return "DFlash heads" if self.dflash is not None else "draft layers"

    @property
    def scale(self) -> float:
        return self.attention_scale or 1.0 / math.sqrt(self.head_dim)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Attention layers with keys and values of their own, grouped by window and heads, full
        attention first, then the convolutions, then the recurrent states. A model without windows
        and recurrent layers has one group."""
        if self.assistant is not None:
            return self.assistant.target.groups
        attention: dict[tuple[bool, int, int, int], list[int]] = {}
        for i, a in enumerate(self.layers):
            if a.mixer == "attention" and a.kv_layer is None:
                key = (a.window is not None, a.window or 0, *self.kv_shape(i))
                attention.setdefault(key, []).append(i)
        groups = [CacheGroup(k[1] or None, tuple(attention[k])) for k in sorted(attention)]
        mixers = [layer.mixer for layer in self.layers]
        if conv := tuple(i for i, mixer in enumerate(mixers) if mixer != "attention"):
            groups.append(CacheGroup(self.conv_kernel, conv, "conv"))
        if delta := tuple(i for i, mixer in enumerate(mixers) if mixer == "delta"):
            groups.append(CacheGroup(2, delta, "state"))
        return tuple(groups)

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Key heads of a layer, and the size of a head."""
        own = self.layers[layer]
        return own.kv_heads or self.kv_heads, own.head_dim or self.head_dim

    @property
    def min_kv_heads(self) -> int:
        return min(layer.kv_heads or self.kv_heads for layer in self.layers)

    @property
    def max_head_dim(self) -> int:
        return max(layer.head_dim or self.head_dim for layer in self.layers)

    def mlp_width(self, layer: int) -> int:
        return self.layers[layer].mlp or self.mlp

    @property
    def recurrent(self) -> bool:
        return any(layer.mixer != "attention" for layer in self.layers)

    @property
    def attention_layers(self) -> int:
        return sum(layer.mixer == "attention" for layer in self.layers)

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution of conv and delta layers."""
        return self.hidden if self.delta is None else self.delta.qkv

    @property
    def update_values(self) -> int:
        """Values that one position of a delta layer adds to its state block: key, value, decay and
        beta."""
        delta = self.delta
        return 0 if delta is None else delta.keys + delta.values + 2 * delta.value_heads

    @property
    def state_values(self) -> int:
        """Values of the state of one delta layer."""
        delta = self.delta
        return 0 if delta is None else delta.values * delta.key_dim

    def block_values(self, group: CacheGroup, block_size: int) -> int:
        """Values in a block of one layer of the group."""
        if group.kind == "conv":
            return block_size * self.conv_channels
        if group.kind == "state":
            return self.state_values + block_size * self.update_values
        return block_size * self.kv_values(group.layers[0])

    def kv_values(self, layer: int) -> int:
        """Values that one token adds to the KV cache of a layer (keys and values)."""
        kv_heads, head_dim = self.kv_shape(layer)
        return 2 * kv_heads * head_dim

    @property
    def kv_token_values(self) -> int:
        """Values that one token adds to the KV cache of all layers."""
        groups = [group for group in self.groups if group.kind == "attention"]
        return sum(len(group.layers) * self.kv_values(group.layers[0]) for group in groups)
