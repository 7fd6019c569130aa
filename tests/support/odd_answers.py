"""Texts that break parsers: huge, deeply nested, odd Unicode, and what regular expressions choke on. Built, not stored.

``ODD_ANSWERS`` maps a short name to an answer; none of them is right for any task, except by accident.
"""

from __future__ import annotations

from typing import Final

MANY: Final = 10**6
NESTED: Final = 10**5

ODD_ANSWERS: Final[dict[str, str]] = {
    "nothing": "",
    "spaces": " \t\r\n\v\f\x1c\x85\u2028\u2029\u00a0\u3000" * 1000,
    "NUL": "\0" * 1000,
    "controls": "".join(map(chr, range(32))) * 100,
    "lone surrogates": "\ud800\udfff\udc80" * 1000,
    "right to left": "\u202e\u202d\u2066\u2069\u200f42\u202c" * 1000,
    "combining marks": "e" + "\u0301" * MANY,
    "joined emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467\ufe0f" * 10_000,
    "noncharacters": "\ufffe\uffff\U0010ffff" * 1000,
    "digits of other scripts": "\u0664\u0662 \u0967\u0968 \uff14\uff12 \U0001d7d2\U0001d7d0 \u2463\u00b2\u2162",
    "case that grows": "\u0130\u1e9e\ufb03\u0149" * 10_000,
    "a long number": "9" * MANY,
    "a long fraction": "0." + "3" * MANY,
    "exponents": "1e400, -1E-400, 0x1p99999, inf, nan, -0",
    "a great exponent": "1e999999999",
    "a small exponent": "-1e-999999999",
    "a fraction of exponents": "1/1e999999999",
    "a move a billion times": "R999999999 U2 F'999999999",
    "moves without an end": '{"agent[0.5, 0.5]": "move(' + ", " * 30_000 + '"}',
    "a bush": '{"a": ' * 300 + "[" + "0, " * 3_000 + "0]" + "}" * 300,
    "hex digits": "0x" + "f" * 60_000,
    "one digit and a letter": "1" * 60_000 + "x",
    "a fraction in LaTeX": "\\frac{" + " " * 30_000 + "1" * 30_000,
    "towers": "Move disk 1 from Peg 1 to Peg 9999999999\n" * 1_000,
    "a tower of powers": "9**9**9**9**9",
    "Roman zeros": "0" * 50_000 + "1",
    "round brackets": "(" * NESTED,
    "square brackets": "[" * NESTED + "]" * NESTED,
    "curly brackets": '{"a":' * NESTED + "1" + "}" * NESTED,
    "nested lists": "[[" * 400 + "1" + "]]" * 400,
    "a wide list": "[" + "1," * 200_000 + "1]",
    "a wide table": "[[" + "1, 2, 3], [" * 50_000 + "1, 2, 3]]",
    "lines": "1 2 3\n" * 100_000,
    "commas": "," * NESTED,
    "minus signs": "-" * NESTED,
    "spaces between": "a" + " " * NESTED + "b",
    "word after word": "to be or not " * 20_000,
    "aaaa!": "a" * NESTED + "!",
    "quotes": "'" * 30_000 + '"' * 30_000 + "\\" * 30_000,
    "tags": "<answer>" * 20_000 + "</answer>" * 20_000,
    "tags without an end": "<answer>" * 60_000 + "1",
    "boxes": "\\boxed{" * 20_000 + "}" * 20_000,
    "arrows": "a->b " * 30_000 + "=> " * 30_000,
    "pairs": "(1, 2) -> (3, 4), " * 8_000,
    "dates": "2024-02-30 99:99:99 0000-00-00 " * 4_000,
    "percent signs": "%s%n%x%p{0.__class__}{}" * 5_000,
    "code": "__import__('os').system('true')",
    "a comprehension": "[x for x in range(10**12)]",
    "an alias bomb": "a: &a [1]\n" + "".join(f"b{n}: &b{n} [*a,*a]\n" for n in range(500)),
    "null": "null",
    "a map": '{"answer": {"answer": [null, true, 1e999]}}',
    "a huge map": "{" + ",".join(f'"k{n}": {n}' for n in range(20_000)) + "}",
}
"""None of these is above a few megabytes: a completion of 32k tokens is no longer."""
