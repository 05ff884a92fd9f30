"""Hunyuan (dense): llama with an RMS norm of each query and key head after the rotation."""

from __future__ import annotations

from dataclasses import replace

from verbatim.model.families.common import parts, rope_record, rows, tensors
from verbatim.model.families.common.family import Config, Family, Gguf, Record, RopeRules, tiny
from verbatim.model.keys import Table, followed, must_equal, no_effect

_UNUSED = (
    *("add_classification_head", "attention_head_dim", "cla_share_factor", "class_num"),
    *("dense_list", "im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "org_vocab_size"),
    *("pad_id", "pool_type", "text_end_id", "text_start_id"),
)


def _records(c: Config) -> tuple[Record, Record]:
    record = rope_record.family_record(c)
    if record["rope_type"] == "dynamic" and record.get("alpha"):
        record["rope_type"] = "ntk_alpha"  # independent of the length, unlike dynamic
    return record, record


_KEYS: Table = {
    "eod_token_id": no_effect("eos_token_id decides"),
    "use_qk_norm": must_equal(True, note="heads are normed, as in transformers"),
    "use_cla": must_equal(False, note="every layer has its own keys"),
    "use_rotary_pos_emb": must_equal(True, note="positions are rotary"),
    "norm_type": must_equal("rms", note="the norms are RMS norms"),
    **dict.fromkeys(_UNUSED, no_effect("not used by this family")),
}
_ALPHA = followed(
    "with dynamic: theta is multiplied by alpha ** (d / (d - 2)); null: as absent", nullable=True
)
FAMILY = Family(
    model_type="hunyuan_v1_dense",
    name="hunyuan-dense",
    models="Hunyuan (dense)",
    keys=rows.rotary_keys(rows.FULL, rows.ATTENTION_BIASES, _KEYS),
    spec=lambda c: replace(parts.rotary(c, _records(c)[0]), qk_norm="rotated_head"),
    records=_records,
    rope=RopeRules(keys={"alpha": _ALPHA}),
    names=tensors.hf_names(
        {"attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm"}
    ),
    gguf=Gguf("hunyuan-dense"),
    tiny={"hunyuan-dense": tiny(head_dim=16)},
)
