// The proof: replay the receipt of every request behind the current branch, now, and compare the
// tokens and every number that the page shows.

import { post, Trouble } from "./api.js";
import { announce, changed, current, fail, state } from "./store.js";

// what is compared, number by number
const NUMBERS = ["token", "logit", "logprob", "rank", "entropy", "margin", "score", "lead"];

export async function prove() {
  const branch = current();
  const segments = [...new Set(branch.tokens.map((t) => t.segment))].filter((s) => s.receipt);
  state.proof = { state: "running" };
  changed();
  try {
    if (!segments.length) throw new Trouble("This run has no receipt: only one that has ended has one.");
    let tokens = 0, numbers = 0;
    for (const segment of segments) {
      const answer = await post("/lens/api/replay", { receipt: segment.receipt, explain: state.info.max_logprobs });
      if (!answer.identical) return verdict("different", `${answer.message}`, segment.from + answer.position);
      const shown = branch.tokens
        .map((token, index) => ({ token, index }))
        .filter(({ token }) => token.segment === segment && token.record && !token.forced);
      for (const { token, index } of shown) {
        const fresh = answer.explain[token.choice ?? 0]?.[index - segment.from];
        const wrong = fresh && difference(token.record, fresh);
        if (wrong) return verdict("different", `token ${index + 1}: the page shows ${wrong.name} ${wrong.shown}, the replay has ${wrong.fresh}`, index);
        numbers += NUMBERS.length + 4 * token.record.top.length;
      }
      tokens += answer.tokens;
    }
    const open = branch.tokens.filter((t) => !t.segment.receipt).length;
    return verdict("identical", `${tokens} tokens and ${numbers.toLocaleString("en")} numbers, replayed now, are identical.${open ? ` ${open} tokens of this branch have no receipt.` : ""}`);
  } catch (error) {
    state.proof = null;
    if (error.param === "receipt" || error.code === "invalid_parameter")
      return verdict("different", error.message, null);
    return fail(error);
  }
}

function verdict(kind, message, index = null) {
  state.proof = { state: kind, message, index };
  announce(`${kind}: ${message}`);
  changed();
}

// the first number that differs, or null
function difference(shown, fresh) {
  for (const name of NUMBERS)
    if ((shown[name] ?? null) !== (fresh[name] ?? null))
      return { name, shown: shown[name], fresh: fresh[name] };
  for (const [i, candidate] of shown.top.entries()) {
    const other = fresh.top[i];
    for (const name of ["id", "logit", "logprob", "noise"])
      if (candidate[name] !== other?.[name])
        return { name: `${name} of candidate ${i + 1}`, shown: candidate[name], fresh: other?.[name] };
  }
  return null;
}
