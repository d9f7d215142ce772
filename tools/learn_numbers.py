# SPDX-License-Identifier: Apache-2.0
"""Checks the numbers in the prose of a page against marks: comments of HTML beside the paragraph, one mark a line.

    <!-- sum: 0.8280 / 0.4181 = 1.98
         shown: fa3: launch 43 % -->

Kinds of marks (docs/learn/README.md, "For maintainers", has an example of each):

    sum: A [= B ...] = RESULT   arithmetic; RESULT is A rounded to as many digits as RESULT has. Each number of A must
                                be in an output, a command or a mark above, at most 16, or a power of 2 or 10
    shown: TEXT                 TEXT stands in an output of this page; runs of spaces and line ends are alike
    run: COMMAND -> TEXT        TEXT stands in the output of a command that the page doesn't show
    marked: NUMBERS [in PAGE]   the numbers have a mark further up, or on another page of docs/learn
    given: NUMBERS; SOURCE      the numbers come from outside: a paper, a data sheet, a definition

A number needs a mark unless it is one of these: part of a name (H100, fp16, FlashAttention-2), of code or of a link;
the number of a lesson, a part or a list item; a year; a version; a size from a command of the page, from the opening
question or from the exercise; a whole number below 10 that counts or indexes, without a unit of measurement after it.
"""
import ast
import math
import operator
import re

MARK = re.compile(r"^ *<!--\s*((?:sum|shown|run|marked|given):.*?)-->[ ]*$", re.MULTILINE | re.DOTALL)
KIND = re.compile(r"^(sum|shown|run|marked|given):\s*(.*)$")
MEASURE = re.compile(r"x\b|\s*(?:%|times\b|ms\b|us\b|microseconds?\b|(?:T|G)?FLOP|[TGMK]i?B\b|GHz|clocks?\b|[bm]illion\b)")
WHOLE = re.compile(r"(?<![\d.,])\d+(?:,\d{3})*(?![\d.]*\d)")
# Text that stands before the number of a thing, and before an exponent.
NAMED = re.compile(r"(?:[A-Za-z_][-_.]?|\d\^|(?:[Ll]essons?(?: \d+(?:,| to| and))*|Part|Debian|Ubuntu|PyTorch"
                   r"|RTX(?: \d+ and)?|[Rr]elease|[Rr]ow|[Kk]ey|[Ll]ines?(?: \d+ to)?) )$")
YEAR = re.compile(r"19[5-9]\d|20[0-3]\d")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.Pow: operator.pow, ast.USub: operator.neg}
FUNCTIONS = {"exp": math.exp, "log2": math.log2, "ln": math.log, "log10": math.log10}


def plain(number):
    return number.replace(",", "")


def numbers_of(text):
    return {plain(match[0]) for match in re.finditer(r"\d+(?:,\d{3})*(?:\.\d+)?", text)}


def counts(number):
    """Whether a sum may use the number as it is: up to 16, or a power of two or ten."""
    return number.isdigit() and (int(number) <= 16 or int(number).bit_count() == 1 or set(number[1:]) == {"0"})


def joined(text):
    """Returns the text with each run of blanks as one space."""
    return re.sub(r"\s+", " ", text).strip()


def value_of(expression):
    def work_out(node):
        if isinstance(node, ast.Expression):
            return work_out(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](work_out(node.left), work_out(node.right))
        if isinstance(node, ast.UnaryOp):
            return OPERATORS[type(node.op)](work_out(node.operand))
        if isinstance(node, ast.Call) and node.func.id in FUNCTIONS:
            return FUNCTIONS[node.func.id](work_out(node.args[0]))
        raise ValueError
    try:
        return work_out(ast.parse(re.sub(r"(?<=\d),(?=\d{3})", "", expression).replace("^", "**").strip(), mode="eval"))
    except (ValueError, SyntaxError, KeyError, AttributeError, ZeroDivisionError):
        raise ValueError(f"expected arithmetic, got {expression.strip()!r}") from None


def agrees(value, printed):
    """Whether the printed number is the value, rounded to the printed digits."""
    printed = plain(printed.strip())
    digits = len(printed.split(".")[1]) if "." in printed else 0
    return abs(value - float(printed)) <= 0.5000001 * 10**-digits


class Page:
    """The numbers of one page. `outputs` and `commands` are those of its console blocks; `run` runs a command."""

    def __init__(self, name, text, outputs, commands, run, pages):
        self.name, self.text, self.run, self.pages = name, text, run, pages
        self.output = joined(" ".join(outputs))
        self.sizes = numbers_of(" ".join(commands))
        for question in re.findall(r"\*\*Before you read on\.\*\*(?:(?!<!--).+\n)+", text):
            self.sizes |= {plain(match[0]) for match in WHOLE.finditer(question)
                           if not MEASURE.match(question[match.end():])}
        for command, output in zip(commands, outputs):
            if re.search(r" learn \d+ --show", command):
                self.sizes |= numbers_of(output)
        self.known = numbers_of(self.output) | self.sizes
        self.marked = set()
        self.problems = []

    def problem(self, text):
        self.problems.append(f"{self.name}: {text}")

    def read_sum(self, text):
        first, *rest = [part.strip() for part in text.split("=")]
        if not rest:
            return self.problem(f"sum: {text}: expected \"= RESULT\"")
        unknown = {n for n in numbers_of(first) - self.known if not counts(n)}
        if unknown:
            self.problem(f"sum: {text}: {', '.join(sorted(unknown))}: neither in an output nor in a mark above")
        try:
            value = value_of(first)
            for result in rest[:-1]:
                if not math.isclose(value_of(result), value, rel_tol=1e-9):
                    self.problem(f"sum: {text}: {result} is {value_of(result):.6g}, {first} is {value:.6g}")
            if not agrees(value, rest[-1]):
                self.problem(f"sum: {first} is {value:.6g}, the page says {rest[-1]}")
        except ValueError as error:
            return self.problem(f"sum: {text}: {error}")
        return numbers_of(text)

    def read_mark(self, kind, text):
        """Checks one mark, and returns the numbers that it stands for."""
        if kind == "sum":
            return self.read_sum(text)
        if kind == "shown":
            if joined(text) not in self.output:
                self.problem(f"shown: {text}: no output of the page has it")
            return numbers_of(text)
        if kind == "run":
            command, _, printed = text.partition(" -> ")
            if not printed or joined(printed) not in joined(self.run(command)):
                self.problem(f"run: {command}: its output does not have: {printed}")
            return numbers_of(printed)
        if kind == "marked":
            numbers, _, page = text.partition(" in ")
            where = self.pages(page.strip()) if page else self.marked
            missing = numbers_of(numbers) - where
            if missing:
                self.problem(f"marked: {', '.join(sorted(missing))}: no mark of {page or 'this page'} has it")
            return numbers_of(numbers)
        numbers, _, source = text.partition("; ")
        if not source:
            self.problem(f"given: {text}: expected \"; SOURCE\"")
        return numbers_of(numbers)

    def read_marks(self, comment):
        found = set()
        lines = []
        for line in comment.split("\n"):
            match = KIND.match(line.strip())
            if match:
                lines.append([match[1], match[2]])
            elif line.strip():
                lines[-1][1] += " " + line.strip()
        for kind, text in lines:
            numbers = self.read_mark(kind, text.strip()) or set()
            self.known |= numbers
            self.marked |= numbers
            found |= numbers
        return found

    def unmarked(self, paragraph, marked):
        """Yields the numbers of a paragraph that have no mark and are of no kind that needs none."""
        paragraph = re.sub(r"`[^`]*`|\]\([^)]*\)|^ *\d+\. |<[^>]*>", " ", paragraph, flags=re.MULTILINE)
        paragraph = re.sub(r"^ *\[(?=\d+\. )", " ", paragraph, flags=re.MULTILINE)
        paragraph = re.sub(r"\[\d+\. |Next: \[?\d+\.|\b\d{4}-\d\d-\d\d\b", " ", joined(paragraph))
        for match in re.finditer(r"\d+(?:,\d{3})*(?:\.\d+)?", paragraph):
            number, before = plain(match[0]), paragraph[:match.start()]
            if number in marked or number in self.sizes:
                continue
            if NAMED.search(before) or YEAR.fullmatch(number):
                continue
            if number.isdigit() and int(number) < 10 and not MEASURE.match(paragraph[match.end():]):
                continue
            yield match[0]

    def check(self, strict):
        """Checks all marks, and, if `strict`, that every number has one."""
        text = re.sub(r"^ *```.*?^ *```$", lambda m: "\n" * m[0].count("\n"), self.text, flags=re.MULTILINE | re.DOTALL)
        at = 0
        for match in list(MARK.finditer(text)) + [None]:
            prose = text[at:match.start()] if match else text[at:]
            paragraphs = [p for p in re.split(r"\n\s*\n", prose.rstrip("\n ")) if p.strip()]
            marked = self.read_marks(match[1]) if match else set()
            for index, paragraph in enumerate(paragraphs):
                beside = marked if match and index == len(paragraphs) - 1 else set()
                if not strict or paragraph.startswith(("#", "    ")):
                    continue
                line = self.text.count("\n", 0, self.text.find(paragraph.strip()[:60])) + 1
                for number in self.unmarked(paragraph, beside):
                    self.problem(f"line {line}: {number} has no mark: {joined(paragraph)[:70]}")
            at = match.end() if match else at
        return self.problems

