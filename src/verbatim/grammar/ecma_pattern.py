r"""ECMA-262 patterns of JSON schemas in the syntax of Rust's regex crate, which llguidance reads.

In: a pattern. Out: the same pattern with `\d`, `\w`, `\s` and their negations spelled out, and with
`[`, `&`, `~` and `-` inside a class escaped where Rust reads a set operation. ECMA-262 reads `\d`,
`\w` and `\s` as ASCII classes (and its own white space), validators in Rust or Python as Unicode
classes. With `common` the result matches only what all of them match, so that a document is valid
for every validator.

A negated class also excludes U+0000. llguidance 1.9 takes a class with every control character for
one with every escape, so that `[^"]` would match the quotation mark as a JSON string writes it.
"""

from __future__ import annotations

_ECMA = {
    "d": "0-9",
    "w": "A-Za-z0-9_",
    "s": r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",
}
_ALL = {"s": _ECMA["s"].removesuffix(r"\ufeff")}  # members for every validator
_ANY = {
    "d": r"\p{Nd}",
    "w": r"\p{L}\p{M}\p{N}_",
    "s": _ECMA["s"] + r"\x1c-\x1f\x85",
}  # members of each class in at least one validator


def rust_pattern(pattern: str, *, common: bool) -> str:
    r"""An ECMA-262 pattern for Rust's regex: classes such as \d get ECMA's members. `common`: only
    members that every JSON Schema validator agrees on.

    >>> rust_pattern(r"^\d+[^\w]$", common=True), rust_pattern(r"^\d+[^\w]$", common=False)
    ('^[0-9]+[^\\x00\\p{L}\\p{M}\\p{N}_]$', '^[0-9]+[^\\x00A-Za-z0-9_]$')
    >>> rust_pattern("[[&&~~][--/][+--]", common=True)
    '[\\[\\&\\&\\~\\~][\\--/][+-\\-]'
    >>> rust_pattern("[a-c--/]", common=True)  # the second range starts at the hyphen
    '[a-c\\--/]'
    """
    inside, outside = (_ALL, _ANY) if common else (_ECMA, _ECMA)
    out: list[str] = []
    in_class = negated = False
    at = first = 0  # first: index of the first member of the class
    part = 0  # position in a class's range: 0 its start is next, 1 a hyphen may follow, 2 its end
    while at < len(pattern):
        sign = pattern[at]
        if sign == "\\":
            letter = pattern[at + 1 : at + 2]
            at += 2
            name = letter.lower()
            part = 0 if part == 2 else 1
            if name not in _ECMA:
                out.append(sign + letter)
                continue
            # A member is excluded by \D and inside [^...], but not by both.
            excluded = letter.isupper() != (in_class and negated)
            members = (outside if excluded else inside).get(name, _ECMA[name])
            if letter.isupper():
                out.append(f"[^{members}]")
            else:
                out.append(members if in_class else f"[{members}]")
            continue
        if sign == "[" and not in_class:
            in_class, negated = True, pattern[at + 1 : at + 2] == "^"
            first, part = at + 1 + negated, 0
        elif sign == "]":
            in_class = False
        elif in_class and sign == "-" and part == 1:
            part = 2
        elif in_class and at >= first:  # not the sign of a negation
            part = 0 if part == 2 else 1
            sign = f"\\{sign}" if sign in "[&~-" else sign
        out.append(sign)
        at += 1
        if in_class and negated and at == first and pattern[at : at + 1] != "]":
            out.append(r"\x00")
    return "".join(out)
