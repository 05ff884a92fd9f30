// An answer of the chat page, opened by its receipt: #answer=ID names it in the browser's database.
// The server draws its tokens again, with their explanations; the receipt says that they are the
// same.

import { post, Trouble } from "./api.js";
import { read } from "./run.js";
import { changed, newBranch, newId, show, state } from "./store.js";

const idInAddress = () => location.hash.match(/^#answer=([\w-]{1,64})$/)?.[1];

async function receiptOf(id) {
  const db = await import("/chat-page/db.js");
  await db.open();
  const found = await db.one("receipts", id);
  if (!found) throw new Trouble("This browser has no receipt of that answer; the chat page may have deleted it.");
  return found.receipt;
}

// Show the answer that the address names, if it names one.
export async function openAnswer() {
  const id = idInAddress();
  if (!id) return;
  const receipt = await receiptOf(id);
  const answer = await post("/lens/api/replay", { receipt, explain: state.info.max_logprobs });
  const promptIds = receipt.prompt_ids, several = receipt.choices.length > 1;
  const segment = { id: newId(), promptIds, params: receipt.params, from: 0 };
  const branches = receipt.choices.map((_, i) => newBranch({ promptIds, label: several ? `answer ${i + 1}` : "run" }));
  const choices = answer.explain.map((explain, index) => ({ index, explain, loop: answer.loops[index] }));
  const { usage, loops, scores } = answer;
  const same = answer.identical ? receipt : answer.receipt;
  read({ choices, receipt: same, usage, loops, scores }, (index) => branches[index], segment);
  for (const branch of branches) branch.status = "done";
  Object.assign(state, { mode: "raw", input: "" }); // no prompt that the tokens below do not have
  show(branches[0].id, 0);
  const message = answer.identical ? `${answer.tokens} tokens of the answer in the chat, drawn again now.` : answer.message;
  state.proof = { state: answer.identical ? "identical" : "different", message, index: answer.identical ? null : answer.position };
  changed();
}
