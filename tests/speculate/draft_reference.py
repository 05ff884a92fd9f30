"""A draft layer in NumPy and float64, from the mathematics of the published modelling code.

DeepSeek-V3's multi-token prediction, which Qwen and GLM share: with the target's final state h of
position p and the token t at p + 1,

    x      = project · [norm(embedding(t)); norm(h)]
    h'     = norm(decoder layer(x))        attention over the x of all positions up to p
    logits = head · h'                     of the token at p + 2; h' is the state of the next draft
"""

from __future__ import annotations

import numpy as np
from draft_checkpoints import HEAD, HEADS, KV, State

EPS, ROTATED, THETA, USED, SCALE = 1e-5, HEAD // 2, 10000.0, 2, 1.5


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class DraftReference:
    def __init__(self, kind: str, state: State) -> None:
        self.state = {name: values.astype(np.float64) for name, values in state.items()}
        self.glm = kind == "glm4_moe"
        self.offset = 0.0 if self.glm else 1.0
        self.layer = "model.layers.2." if self.glm else "mtp.layers.0."
        own = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        prefix = self.layer if self.glm else "mtp."
        self.own = [f"{prefix}{name}.weight" for name in (own if self.glm else names)]

    def drafts(self, tokens: list[int], states: np.ndarray, count: int) -> list[np.ndarray]:
        """The logits of `count` drafts after `tokens`, each after the most likely draft before.
        `states`: of all positions but the last."""
        embedding_norm, state_norm, project, out_norm = self.own
        known, rows = list(tokens[1:]), list(states.astype(np.float64))
        found = []
        for _ in range(count):
            e = self.norm(self.state["model.embed_tokens.weight"][known], embedding_norm)
            h = self.norm(np.stack(rows), state_norm)
            x = np.concatenate([e, h], axis=1) @ self.state[project].T
            out = self.norm(self.decoder_layer(x)[-1], out_norm)
            logits = self.state["lm_head.weight"] @ out
            found.append(logits)
            known.append(int(logits.argmax()))
            rows.append(out)
        return found

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scaled = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
        return scaled * (self.state[name] + self.offset)

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.state[f"{self.layer}{name}.weight"].T

    def decoder_layer(self, x: np.ndarray) -> np.ndarray:
        h = self.norm(x, f"{self.layer}input_layernorm.weight")
        x = x + self.attention(h)
        h = self.norm(x, f"{self.layer}post_attention_layernorm.weight")
        return x + (self.moe(h) if f"{self.layer}mlp.gate.weight" in self.state else self.mlp(h))

    def attention(self, h: np.ndarray) -> np.ndarray:
        rows = len(h)
        q = self.linear(h, "self_attn.q_proj").reshape(rows, HEADS, -1)
        q, gate = q[..., :HEAD], q[..., HEAD:]
        k, v = (self.linear(h, f"self_attn.{p}_proj").reshape(rows, KV, HEAD) for p in "kv")
        q = self.rotated(self.norm(q, f"{self.layer}self_attn.q_norm.weight"))
        k = self.rotated(self.norm(k, f"{self.layer}self_attn.k_norm.weight"))
        k, v = (np.repeat(part, HEADS // KV, axis=1) for part in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(HEAD)
        scores = np.where(np.tril(np.ones((rows, rows), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hij,jhd->ihd", weights, v)
        if not self.glm:
            out = out * sigmoid(gate)
        return self.linear(out.reshape(rows, -1), "self_attn.o_proj")

    def rotated(self, x: np.ndarray) -> np.ndarray:
        half = ROTATED // 2
        angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b, rest = x[..., :half], x[..., half:ROTATED], x[..., ROTATED:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def mlp(self, h: np.ndarray, prefix: str = "mlp") -> np.ndarray:
        gate, up = (self.linear(h, f"{prefix}.{part}_proj") for part in ("gate", "up"))
        return self.linear(gate * sigmoid(gate) * up, f"{prefix}.down_proj")

    def moe(self, h: np.ndarray) -> np.ndarray:
        logits = self.linear(h, "mlp.gate")
        scores, choice = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), 0.0
        if self.glm:
            scores = sigmoid(logits)
            choice = self.state[f"{self.layer}mlp.gate.e_score_correction_bias"]
        out = np.zeros_like(h)
        for row, chosen in enumerate(np.argsort(-(scores + choice))[:, :USED]):
            shares = scores[row, chosen] / scores[row, chosen].sum()
            for share, expert in zip(shares, chosen, strict=True):
                y = self.mlp(h[row : row + 1], f"mlp.experts.{expert}")[0]
                out[row] += (SCALE if self.glm else 1.0) * share * y
        if self.glm:
            return out + self.mlp(h, "mlp.shared_experts")
        gate = sigmoid(self.linear(h, "mlp.shared_expert_gate"))
        return out + gate * self.mlp(h, "mlp.shared_expert")
