"""Floors that a trained model passes and a scrambled one does not: plain text in six languages, the
same text again at a long distance, and the file's rope_theta against a tenth and ten times of it.

In: an LLM. Out: a Reading (log-probabilities of one sequence of at most 2,048 tokens) and Findings.
No figure here is fitted to a model: each floor lies between two quantities of the text itself or
of the same model, and no language is expected of a model, only one of the six.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from verbatim.diagnose.doctor.findings import Finding, bad, checks, good, note
from verbatim.diagnose.doctor.kv_cost import TEXT

if TYPE_CHECKING:
    from verbatim.engine.calls.llm import LLM
    from verbatim.model.loading.load import Model
    from verbatim.model.spec import LayerSpec

TEXTS = {
    "English": "Water expands when it freezes. That is why ice floats, why pipes burst in winter,"
    " and why a lake freezes from the top. If ice sank, a lake would freeze from the bottom, and"
    " few fish would survive until spring. In summer the sun warms the water near the surface, and"
    " children swim in it all day.",
    "Spanish": "El pan se hace con harina, agua, sal y levadura. Primero se mezcla todo en un plato"
    " grande y se trabaja la masa con las manos durante diez minutos. Después hay que esperar una"
    " hora, hasta que la masa sea dos veces más grande. Por último se pone en el horno y se come"
    " todavía caliente.",
    "French": "La vieille maison se trouve au bord de la mer, à dix minutes du village. Au"
    " printemps, les enfants y vont tous les jours après l'école, parce que le jardin est plein de"
    " fleurs. Le soir, quand il fait froid, leur grand-mère leur raconte des histoires devant le"
    " feu.",
    "German": "Der Zug nach Berlin fährt jeden Morgen um sieben Uhr ab. Auf dem Bahnsteig stehen"
    " viele Menschen, die zur Arbeit wollen, und einige von ihnen lesen die Zeitung. Wenn es"
    " regnet, kommt der Zug oft zu spät, und dann müssen alle warten, bis er endlich da ist.",
    "Russian": "Зимой в нашем городе очень холодно, и день кончается рано. Люди идут домой, пьют"
    " горячий чай и смотрят телевизор. Летом всё по-другому: дети играют на улице до вечера, а их"
    " родители работают в саду. Моя сестра живёт в Москве и приезжает к нам только на Новый год.",
    "Chinese": "今天天气很好，我们一家人去公园玩。公园里有很多人，有的在跑步，有的在唱歌，"
    "还有的坐在树下看书。中午我们在湖边吃饭，妈妈做的菜非常好吃。下午我们坐船，看见水里有很多鱼。"
    "回家的时候，天已经黑了，但是大家都很高兴。",
}
TEXT_TOKENS = 128  # most tokens of a language; between the copies lie four times as many of TEXT
MIN_TOKENS = 16  # least tokens of a language: a context below 256 tokens holds too little to judge
COPIED = 0.5  # most nats of the second copy, as a fraction of the first copy's
THETAS = (0.1, 10.0)  # times the file's rope_theta
BETTER = 0.05  # nats per token (5 % of the perplexity) by which another rope_theta must be better
Z = 4.0  # and standard errors: 1 false alarm in 30,000 if the differences were independent


@dataclass(frozen=True, slots=True)
class Reading:
    """Nats of each token of one sequence: the languages, another text, the languages again."""

    nats: np.ndarray  # negative log-probability of every token after the first
    languages: Mapping[str, tuple[float, float]]  # nats per token; floor
    own_entropy: Mapping[str, float]  # nats per token of a code that knows the text's frequencies
    first: float  # nats per token of the first copy
    second: float
    distance: int  # tokens between a token and its copy


def read_texts(llm: LLM) -> Reading | None:
    """None: the context is too short for texts of MIN_TOKENS."""
    most = min(TEXT_TOKENS, llm.context // 16)
    if most < MIN_TOKENS:
        return None
    texts = {name: llm.encode(text)[:most] for name, text in TEXTS.items()}
    first = [token for text in texts.values() for token in text]
    ids = [*first, *llm.encode(TEXT)[: 4 * most]]
    distance = len(ids)
    rows = llm.score([*ids, *first]).logprobs[1:]
    nats = np.array([-row.logprob for row in rows if row is not None])
    found, entropies, at = {}, {}, -1  # the sequence's first token has no log-probability
    for name, text in texts.items():
        counts = Counter(text).values()
        own = -math.fsum(n / len(text) * math.log(n / len(text)) for n in counts)
        part = nats[max(at, 0) : at + len(text)]
        found[name] = float(part.mean()), (own + math.log(llm.tokenizer.vocab_size)) / 2
        entropies[name], at = own, at + len(text)
    start = len(first) - 1
    copy = nats[distance - 1 :]
    return Reading(nats, found, entropies, float(nats[:start].mean()), float(copy.mean()), distance)


def check_language(reading: Reading) -> Finding:
    """Does the model predict at least one language better than the floor: halfway between a code
    that knows only how often each token occurs in that very text, and one that knows nothing (the
    logarithm of the vocabulary)? A list of the frequencies of a language's tokens is near it."""
    rows = sorted(reading.languages.items(), key=lambda row: row[1][0] - row[1][1])
    evidence = "nats per token (floor): " + ", ".join(
        f"{name} {nats:.2f} ({floor:.2f})" for name, (nats, floor) in rows
    )
    best, (nats, floor) = rows[0]
    if not nats < floor:
        return bad(
            f"the model predicts none of {len(rows)} languages better than token frequencies would",
            evidence,
            "compare vocabulary, embedding and output matrix with the published ones; random"
            " weights and models of something other than text are reported like this, too",
            check="language",
        )
    if all(nats > reading.own_entropy[name] for name, (nats, _) in rows):
        return note(
            f"plain text is predicted badly, {best} best",
            evidence,
            "normal for models of a few million parameters; else compare the weights and the"
            " tokenizer with the published ones",
            check="language",
        )
    return good(
        f"plain text is predicted, {best} best of {len(rows)} languages", evidence, check="language"
    )


@checks("copy", guarded=False)
def check_copy(reading: Reading, layers: Sequence[LayerSpec]) -> Iterator[Finding]:
    """Is a text cheap the second time? No finding with less than two attention layers that see the
    first copy: one layer finds the token before, another one copies what follows it."""
    seeing = sum(
        layer.mixer == "attention" and (layer.window or math.inf) > reading.distance
        for layer in layers
    )
    if seeing < 2:
        return
    evidence = (
        f"{reading.first:.2f} nats per token the first time, {reading.second:.2f} the second time,"
        f" {reading.distance:,} tokens later"
    )
    if not reading.second < COPIED * reading.first:
        yield bad(
            "the model does not repeat a text that it has read: it does not see that far",
            evidence,
            "compare rope_theta, rope scaling and sliding window with the published config",
        )
        return
    yield good("a text is recognised at a distance", evidence)


def with_theta(model: Model, factor: float) -> Model:
    """The model with `factor` times its rope_theta: theta^(-2j/dim) for pair j of dim/2."""

    def turned(layer: LayerSpec) -> LayerSpec:
        rope = layer.rope
        if rope is None:
            return layer
        found = tuple(f * factor ** (-2 * j / rope.dim) for j, f in enumerate(rope.inv_freq))
        return replace(layer, rope=replace(rope, inv_freq=found))

    layers = tuple(turned(layer) for layer in model.spec.layers)
    return replace(model, spec=replace(model.spec, layers=layers))


def check_theta(stated: Reading, others: Mapping[float, Reading]) -> Finding:
    """Is the file's rope_theta the best of three? A model is trained with one, and predicts worse
    with another."""
    evidence = f"{stated.nats.mean():.3f} nats per token of {len(stated.nats):,}; " + ", ".join(
        f"{other.nats.mean():.3f} with {factor:g} times rope_theta"
        for factor, other in others.items()
    )
    factor = min(others, key=lambda factor: float(others[factor].nats.mean()))
    gains = stated.nats - others[factor].nats
    gain, error = float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))
    if gain > BETTER and gain > Z * error:
        return bad(
            f"the model predicts better with {factor:g} times the rope_theta of its file",
            f"{evidence}; the gain is {gain:.3f} ± {error:.3f}",
            "compare rope_theta and rope scaling with the published config",
            check="rope",
        )
    return good("no other rope_theta predicts clearly better", evidence, check="rope")
