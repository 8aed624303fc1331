r"""Normalizes notation: Unicode signs, spacing, fonts and thousands separators become plain LaTeX.

Runs in time linear in the length and keeps the meaning: `5 cm` keeps its unit, `(1,2)` its brackets.
"""

import re

SIGNS = {
    **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u3000\t\r\n", " "),
    **dict.fromkeys("\u200b\u2060\ufeff\u2061\u2062", ""),
    **dict.fromkeys("−–‐‑", "-"),
    **dict.fromkeys("“”„«»", '"'),
    **dict.fromkeys("‘’", "'"),
    "×": r" \times ",
    "·": r" \cdot ",
    "⋅": r" \cdot ",
    "∙": r" \cdot ",
    "÷": r" \div ",
    "∗": "*",
    "⁄": "/",
    "≤": r" \le ",
    "⩽": r" \le ",
    "≥": r" \ge ",
    "⩾": r" \ge ",
    "≠": r" \ne ",
    "≈": r" \approx ",
    "±": r" \pm ",
    "∓": r" \mp ",
    "∞": r" \infty ",
    "°": r"^\circ ",
    "∅": r" \emptyset ",
    "⌀": r" \emptyset ",
    "∪": r" \cup ",
    "∩": r" \cap ",
    "∈": r" \in ",
    "ℝ": r" \mathbb{R} ",
    "√": r" \sqrt ",
    "π": r" \pi ",
    "θ": r" \theta ",
    "α": r" \alpha ",
    "β": r" \beta ",
    "λ": r" \lambda ",
    "φ": r" \phi ",
    "ω": r" \omega ",
    "∛": r" \sqrt[3] ",
    "½": r" \frac{1}{2} ",
    "¼": r" \frac{1}{4} ",
    "¾": r" \frac{3}{4} ",
    "⅓": r" \frac{1}{3} ",
    "⅔": r" \frac{2}{3} ",
    "⅛": r" \frac{1}{8} ",
    "⟨": r" \langle ",
    "⟩": r" \rangle ",
    "！": "!",
    "，": ",",
}
TABLE = str.maketrans(SIGNS)
POWERS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+", strict=True))
BELOW = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
ROOT_SIGN = re.compile(r"([√∛])\s*([0-9]+|[A-Za-z])")
RAISED = re.compile(f"[{''.join(POWERS)}]+")
LOWERED = re.compile(f"[{''.join(BELOW)}]+")

SIZES = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|hfill|phantom\{\})(?![A-Za-z])\.?"
)
FONTS = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|tt|normal|up)?|mbox|hbox|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|operatorname\*?)\s*\{"
)
FRACTIONS = re.compile(r"\\(?:[dtc]frac|nicefrac|sfrac|xfrac)(?![A-Za-z])")
OVER = re.compile(r"\\over(?![A-Za-z])")
COLOURS = re.compile(r"\\(?:text)?color\s*(?:\[\w+\])?\s*\{[\w!]*\}")
LETTER_SIZES = re.compile(
    r"\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|underline)(?![A-Za-z])"
)
CONSTANT = re.compile(r"\\(?:mathrm|operatorname|text|rm)\s*\{\s*([ei])\s*\}")  # upright e and i
FUNCTION = re.compile(
    r"\\(?:mathrm|operatorname|text|rm)\s*\{\s*((?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp)\s*\}"
)
PUNCTUATION = re.compile(r"\\(?:text|mbox|mathrm)\s*\{(\s*[,.;:]\s*)\}")
RAISED_O = re.compile(r"(?<=[\d}])\s*\^\s*\{?\s*(?:\\(?:text|mathrm)\s*\{\s*)?o\s*\}?\s*\}?(?![A-Za-z}])")
JOINED_COMMA = re.compile(r"(?<=\d)\s*(?:\{\s*,\s*\}|,\s*\\!|\\!\s*,)\s*(?=\d{3}(?!\d))")
NOTHING = re.compile(r"\\!|(?<=[\w})\]])\{\}|\\allowbreak|\\nobreak|\\relax|\\strut|\\null")
SPACES = re.compile(r"(?<!\\)\\[,;:> ]|~|\\[hv]space\*?\s*\{[^{}]{0,20}\}|\\(?:q?quad|enspace|thinspace|,)(?![A-Za-z])")
MANY = re.compile(r" {2,}")
NAMES = {
    r"\leq": r"\le",
    r"\geq": r"\ge",
    r"\leqslant": r"\le",
    r"\geqslant": r"\ge",
    r"\neq": r"\ne",
    r"\lt": "<",
    r"\gt": ">",
    r"\varnothing": r"\emptyset",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\lbrack": "[",
    r"\rbrack": "]",
    r"\lvert": "|",
    r"\rvert": "|",
    r"\vert": "|",
    r"\degree": r"^\circ",
    r"\dbinom": r"\binom",
    r"\tbinom": r"\binom",
    r"\ast": "*",
    r"\lparen": "(",
    r"\rparen": ")",
    r"\dots": r"\ldots",
    r"\colon": ":",
    r"\mid": "|",
    r"\R": r"\mathbb{R}",
    r"\Reals": r"\mathbb{R}",
    r"\infin": r"\infty",
    r"\bf": "",
    r"\rm": "",
    r"\it": "",
    r"\euro": "€",
    r"\pounds": "£",
    r"\textdollar": r"\$",
    r"\dollar": r"\$",
    r"\land": r"\text{and}",
    r"\lor": r"\text{or}",
    r"\vee": r"\text{or}",
}
COMMAND = re.compile(r"\\[A-Za-z]+")
COMMAS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
GAPS = re.compile(r"(?<![\d.])(?<!\d[ ,])[1-9]\d{0,2}(?: \d{3})+(?![\d ]*[\d/])")
NEEDLESS = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
MOST_OVERS = 8
MARKS = ("$$", "$", "**", "__", "`", '"', "''", "*")
DELIMITED = ((r"\(", r"\)"), (r"\[", r"\]"))
PRICE = re.compile(r"^(-?)\$(?= ?[\d.])")
DOLLARS = re.compile(r"(?<!\\)\$")


def clean(text: str) -> str:
    """`text` in normal notation, without decoration. `\\$` marks money, `\\text{...}` marks words."""
    text = JOINED_COMMA.sub("", ROOT_SIGN.sub(written_root, text).translate(TABLE))
    text = undecorated(SPACES.sub(" ", NOTHING.sub("", text)))
    text = RAISED.sub(lambda found: "^{" + "".join(POWERS[c] for c in found[0]) + "}", text)
    text = LOWERED.sub(lambda found: "_{" + "".join(BELOW[c] for c in found[0]) + "}", text)
    text = PUNCTUATION.sub(r"\1", LETTER_SIZES.sub("", COLOURS.sub("", SIZES.sub("", text))))
    text = RAISED_O.sub(r"^\\circ ", FUNCTION.sub(r"\\\1 ", CONSTANT.sub(r"{\1}", text)))
    text = FRACTIONS.sub(r"\\frac", FONTS.sub(r"\\text{", text))
    text = COMMAND.sub(lambda found: NAMES.get(found[0], found[0]), text)
    text = undecorated(MANY.sub(" ", text))
    text = PRICE.sub(r"\1\\$", text) if text.count("$") == 1 else text
    return without_separators(fractions_of(DOLLARS.sub("", text)))


def written_root(found: re.Match[str]) -> str:
    return f"\\sqrt{'[3]' if found[1] == '∛' else ''}{{{found[2]}}}"


def fractions_of(text: str) -> str:
    r"""`a \\over b` as `\\frac{a}{b}`, within the braces around it."""
    for _ in range(MOST_OVERS):
        if not (found := OVER.search(text)):
            break
        opened, closed = opening_brace(text, found.start()), closing_brace(text, found.end())
        begin, end = (0 if opened is None else opened + 1), (len(text) if closed is None else closed)
        over, under = text[begin : found.start()].strip(), text[found.end() : end].strip()
        text = f"{text[:begin]}\\frac{{{over}}}{{{under}}}{text[end:]}"
    return text


def undecorated(text: str) -> str:
    """`text` without surrounding math delimiters, Markdown and quotes, and without punctuation at the end."""
    before = None
    while text != before:
        before = text
        text = text.strip().rstrip(".,;:").rstrip().removesuffix("\\\\").rstrip()
        for mark in MARKS:
            if text.startswith(mark) and text.endswith(mark) and len(text) > 2 * len(mark):
                text = text[len(mark) : -len(mark)].strip()
        for opening, closing in DELIMITED:
            if text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)].strip()
        if text.endswith("$") and not text.endswith(r"\$") and text.count("$") == 1:
            text = text[:-1]
        text = text.lstrip("*").rstrip("*")
        for command in (r"\boxed{", r"\fbox{", r"\text{"):
            text = inside(text, command) or text
    return text


def squeezed(text: str) -> str:
    """`text` without spaces, except between digits: 15 00 is not 1500."""
    return NEEDLESS.sub("", text)


def inside(text: str, opening: str) -> str | None:
    """The content of `opening` + braces if these enclose the whole text, else None."""
    if text.startswith(opening) and closing_brace(text, len(opening)) == len(text) - 1:
        return text[len(opening) : -1].strip()
    return None


def opening_brace(text: str, end: int) -> int | None:
    """Index of the brace that is open at `end`, or None. Ignores escaped braces."""
    opened: list[int] = []
    for i in range(end):
        if text[i] in "{}" and text[i - 1 : i] != "\\":
            if text[i] == "{":
                opened.append(i)
            elif opened:
                opened.pop()
    return opened[-1] if opened else None


def closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one open before `start`, or None. Ignores escaped braces."""
    depth, i = 1, start
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i
        i += 1
    return None


def without_separators(text: str) -> str:
    """1,000 and 1 000 become 1000. In brackets a comma separates items: `(100,200)` is a pair."""
    if "," in text:
        pieces, depth, start = [], 0, 0
        for i, character in enumerate(text):
            if character in "()[]{}":
                if depth == 0:
                    pieces.append(joined(text[start:i]))
                    start = i
                depth = max(depth + (1 if character in "([{" else -1), 0)
                if depth == 0:
                    pieces.append(text[start : i + 1])
                    start = i + 1
        pieces.append(joined(text[start:]) if depth == 0 else text[start:])
        text = "".join(pieces)
    return GAPS.sub(lambda found: found[0].replace(" ", ""), text)


def joined(text: str) -> str:
    return COMMAS.sub(lambda found: found[0].replace(",", ""), text)
