// Token ids to bytes and text. The table comes from the server once, or from a saved run.

// ignoreBOM: U+FEFF is part of a token, not a mark of the encoding to be dropped
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
// control, format (zero width, direction) and variation characters; joiners inside an emoji or a word
// stay as they are
const HIDDEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\ufe0f]/gu;
const code = (character) => `⟨U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
const hex = (bytes) => Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join(" ");

export class Vocab {
  constructor(bytesOf, control = []) {
    this.bytesOf = bytesOf; // id -> Uint8Array
    this.control = new Set(control);
    this.shown = new Map(); // id -> show(id)
  }

  static fromServer({ bytes, lengths, control }) {
    const all = Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0));
    const starts = new Uint32Array(lengths.length + 1);
    lengths.forEach((length, id) => (starts[id + 1] = starts[id] + length));
    return new Vocab((id) => all.subarray(starts[id], starts[id + 1]), control);
  }

  static fromSaved({ tokens, control }) {
    return new Vocab((id) => Uint8Array.from(tokens[id] ?? []), control);
  }

  saved(ids) {
    const tokens = {};
    for (const id of ids) tokens[id] = [...this.bytesOf(id)];
    return { tokens, control: ids.filter((id) => this.control.has(id)) };
  }

  isControl(id) {
    return this.control.has(id);
  }

  // a token for people: blanks, invisible characters and bytes that are no character are visible
  show(id) {
    if (!this.shown.has(id)) this.shown.set(id, this.visible(this.bytesOf(id)));
    return this.shown.get(id);
  }

  visible(bytes) {
    try {
      const text = utf8.decode(bytes);
      const seen = text.trim() ? text : text.replace(/\p{Zs}/gu, "␣");
      const marked = seen.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍");
      return (/\S[\u200c\u200d\ufe0f]/.test(text) ? marked : marked.replace(HIDDEN, code)) || "∅";
    } catch {
      return `⟨${hex(bytes)}⟩`;
    }
  }

  quoted(id) {
    return `“${this.show(id)}”`;
  }

  hex(id) {
    return hex(this.bytesOf(id));
  }

  // the text of many tokens, as the server would write it: without control tokens, and without a
  // character that the last token does not complete
  text(ids) {
    const parts = ids.filter((id) => !this.isControl(id)).map((id) => this.bytesOf(id));
    const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
    let at = 0;
    for (const part of parts) {
      all.set(part, at);
      at += part.length;
    }
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(all, { stream: true });
  }
}
