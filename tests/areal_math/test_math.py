r"""The reward "math": which completions are right for which row's answer. One table; each line is a claim."""

import random

import pytest

from actors.rewards.functions import mathematics

RIGHT = {
    "0.25": [r"P(X = 2) = \frac14", r"\boxed{\Pr[X \ge 2] = 0.25}", r"Hence $E[X|Y=1] = \frac{5}{20} = 0.25$."],
    r"\text{ba}": ["ba", r"\boxed{\mathrm{ba}}"],
    "5": [
        *("5", "5.", "$5$", r"\(5\)", r"\[5\]", "`5`", "**5**", "*5*", "5.0", "05", "+5", r"\boxed{5}"),
        *(r"$$\boxed{5}$$", "5\n", "<answer>5</answer>", "<answer>\n5\n</answer>", "<answer>5", "<think>6</think>5"),
        *("<think>6</think>\n\\boxed{5}", "6</think>5", r"<think>\boxed{6}</think><answer>\boxed{5}</answer>"),
        *("```\n5\n```", "```text\n5\n```", "\\boxed{5}\n#### Notes", "#### 5", "####5", "text\n#### 5\n"),
        *("### Solution\n#### Answer\n5", "The answer is 5.", "The answer is $5$.", "The final answer is: 5"),
        *("Answer: 5", "**Answer:** 5", "**Final Answer**\n5", "The answer is:\n\n$$5$$"),
        *("The answer is 5 because 2 + 3 = 5.", "the answer is **5**", r"Final answer: \(5\)", "x = 5", "$x = 5$"),
        *(r"\boxed{x=5}", r"\boxed{f(2) = 5}", r"\boxed{2+3=5}", r"\boxed{AB = 5}", r"\boxed{5 = x}"),
        *("So she has 5 apples.", "So there are 5 of them left.", "2 + 3 = 5", "She has 2 + 3 = <<2+3=5>>5 apples."),
        *(r"\boxed{5 \text{ cm}}", r"\boxed{5\text{ apples}}", r"\boxed{5^\circ}", r"\boxed{\$5}", r"\boxed{5\%}"),
        *(r"\boxed{\text{5}}", r"\boxed{4} is wrong, so \boxed{5}", r"\boxed{6} \boxed{5}", r"\boxed 5", r"\fbox{5}"),
        *(r"\boxed{\boxed{5}}", r"\boxed{\frac{5}{1}}", "It is not 6. The answer is 5.", "What is 2+3? It is 5."),
        *("5<|im_end|>", "5</s>", "Therefore, the answer is\n\\[\n\\boxed{5}\n\\]"),
    ],
    "6": [
        *(r"\boxed{5} \boxed{6}", r"$\boxed{5}$ and then the other: $\boxed{6}$"),
        "<answer>5</answer> No: <answer>6</answer>",
    ],
    "1500": [
        *("1.5e3", "1.5E3", "1.5e+3", r"1.5 \times 10^3", r"\boxed{1.5 \times 10^{3}}", r"1.5 \cdot 10^{3}"),
        *("1.5 × 10³", "1.5*10^3", "1,500", "1 500", "1{,}500", r"1\,500", r"1,\!500", "1\u2009500", "1\u202f500"),
        *("1\u00a0500", "$1,500", "1500.00", "She pays $1,500.00 in total.", "1.5 thousand", "15 hundred"),
    ],
    "18": [
        *(r"\boxed{USD 18}", "18 USD", "EUR 18", r"\boxed{18¢}", r"18\text{¢}", r"\boxed{18} (no wrong turns)"),
        *(r"- \boxed{18}", r"\boxed{18}^\circ", r"\boxed{18}^{th}", r"\boxed{18}\text{ cm}^2"),
        r"x = \boxed{18} (invalid roots are left out)",
    ],
    r"\$18": ["USD 18", "18 dollars"],
    "1000000": ["10^6", r"\boxed{10^{6}}", "1,000,000", "1 million", "1e6"],
    "-7": [
        *("-7", "−7", r"\boxed{-7}", "The answer is -7.", "x = -7"),
        *(r"$\boxed{-7}$, which cannot be reduced.", "The answer is -7. That is less than 3."),
        "#### -7\nThat is right.",
        *("negative 7", "The answer is negative 7.", "The answer is minus $7$.", r"\boxed{-7}. It is not a power."),
    ],
    "7/2": [
        *("3 1/2", r"3\frac{1}{2}", r"\boxed{3\frac12}", "3.5", "7/2", r"\frac{7}{2}", r"\frac72", r"\dfrac{7}{2}"),
        *(r"\tfrac 7 2", "3½"),
    ],
    r"1\frac{4}{5}": [r"\frac{9}{5}", "1.8", "1 4/5"],
    r"-1\frac{4}{5}": [r"-\frac{9}{5}", "-1.8"],
    r"\frac{1}{2}": [
        *("0.5", ".5", "1/2", r"\frac{2}{4}", r"\frac12", "50%", r"50\%", "½", r"$\frac{1}{2}$"),
        r"\boxed{P(A) = \frac{1}{2}}",
    ],
    r"10\%": ["10%", "10", r"10\%", "10 percent", r"10\text{ percent}", r"\boxed{10\%}"],
    "0.1": ["10%", "1/10", r"\frac{1}{10}", ".10"],
    "033": ["33", "033"],
    r"\varnothing": [
        *(r"\varnothing", r"\emptyset", "∅", r"\{\}", r"\boxed{\varnothing}", "no solution", r"\text{No solution}"),
        "The answer is the empty set.",
    ],
    r"\infty": [r"\infty", "∞", r"+\infty"],
    "A": [
        *("A", "(A)", r"\text{(A)}", r"\boxed{A}", r"\boxed{\text{A}}", r"\boxed{(A)}", "The answer is (A)."),
        *("The answer is A.", "**A**"),
    ],
    "(B)": [
        *("B", "The answer is B", "(B)", r"\textbf{(B)}", "The correct option is (B).", "So the answer is (B) 12 cm."),
        *("B) 12", "Answer: B. Paris"),
    ],
    r"\text{(C)}": [
        *(r"\boxed{\text{(C)}}", "C", "(C)", r"\boxed{\textbf{(C) }5}", "The correct choice is C.", "So it is (C)."),
    ],
    "D": ["The answer is (D).", "Answer: D", "<answer>D</answer>"],
    "E": ["The answer is (E).", r"$\boxed{\textbf{(E)}}$", r"\boxed{\mathrm{E}}"],
    r"\text{Evelyn}": [
        *("Evelyn", r"\boxed{\text{Evelyn}}", r"\boxed{Evelyn}", "The answer is Evelyn.", "evelyn", "**Evelyn**"),
    ],
    r"\text{ellipse}": ["an ellipse", "The graph is an ellipse.", r"\boxed{\text{Ellipse}}"],
    "40_9": ["40_9", "40_{9}", r"\boxed{40_9}", r"40_{\text{nine}}", "40 base 9", "The answer is $40_9$."],
    "5 m": ["5 m", "5", "5 meters", r"\boxed{5\text{ m}}", "5 metres", r"\boxed{5\mathrm{~m}}"],
    r"15\mbox{ cm}^2": ["15", r"15 \text{ cm}^2", "15 square centimeters", r"15\text{ square centimeters}", "15 cm^2"],
    r"864 \mbox{ inches}^2": ["864", "864 square inches", r"864\text{ in}^2"],
    r"\$32,\!348": ["32348", "32,348", "$32,348", r"\$32348", "32348 dollars", "The answer is $32,348."],
    r"5.4 \text{ cents}": ["5.4", "5.4 cents", r"5.4\text{ cents}"],
    r"90^\circ": ["90", "90°", r"90^{\circ}", "90 degrees", r"\boxed{90\text{ degrees}}", r"\angle ABC = 90^\circ"],
    r"\frac{270}7\text{ degrees}": [r"\frac{270}{7}", r"\frac{270}{7}^\circ"],
    "1,-2": [
        *("1,-2", "-2, 1", "1 and -2", r"\{1,-2\}", "x = 1 or x = -2", "x=1, x=-2", r"\boxed{1} and \boxed{-2}"),
        r"\boxed{x = 1, -2}",
    ],
    "3, 5, 7": ["3,5,7", "7, 5, 3", "3, 5, and 7", "3, 5 and 7", "$3$, $5$, and $7$"],
    r"\{1\pm\sqrt{5},-2\}": [r"\{-2, 1-\sqrt5, 1+\sqrt5\}", r"-2, 1 \pm \sqrt{5}"],
    r"1 \pm \sqrt{19}": [r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}", r"x = 1 \pm \sqrt{19}", "1 ± √{19}"],
    r"\pm 3": [r"\pm 3", "3, -3", r"x = \pm 3", "±3"],
    "(1,2)": ["(1,2)", "(1, 2)", r"\left(1, 2\right)", "(x,y) = (1,2)", r"\boxed{(1.0, 2)}"],
    "(3,4]": ["(3,4]", "(3, 4]", r"\left(3,4\right]", r"3 < x \le 4", r"x \in (3,4]"],
    r"(5,\infty)": [r"(5,\infty)", r"(5, +\infty)", "x > 5", "(5, ∞)"],
    r"x \in [-2,7]": ["[-2,7]", r"-2 \le x \le 7", r"x\in[-2, 7]"],
    r"(-\infty, 2) \cup (3, \infty)": [r"(3,\infty)\cup(-\infty,2)", "(-∞, 2) ∪ (3, ∞)"],
    r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}": [
        *(r"\begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix}", r"\begin{bmatrix} -1/3 \\ 2/3 \end{bmatrix}"),
    ],
    "x=5": ["5", "x=5", "x = 5.0", "The answer is 5."],
    "y = 2x + 3": ["2x+3", "y=2x+3", "y = 3 + 2x", "2x - y + 3 = 0"],
    "5x - 7y + 11z + 4 = 0": ["10x - 14y + 22z + 8 = 0", "-5x+7y-11z-4=0"],
    "(x+1)^2": ["x^2+2x+1", "(x+1)(x+1)", "(1+x)^2"],
    r"2\sqrt{3}": [r"\sqrt{12}", r"2\sqrt3", r"2 \cdot \sqrt{3}", "2√3", r"\frac{6}{\sqrt{3}}"],
    r"\frac{20000}{\pi}": [r"\frac{20000}{\pi} \approx 6366", r"20000/\pi"],
    "6 - 5i": ["-5i + 6", "6-5i"],
    "10!": ["10!", "3628800", "3,628,800"],
    "2^{10}": ["1024", "2^{10}"],
    "p - q": ["p-q", "-q + p"],
    "3:4": ["3:4", r"\boxed{3:4}", "3 : 4"],
    # as models and data sets write them: fonts, colours, ranges, ratios, points
    r"-\frac{3}{4}": [
        *("-0.75", r"\frac{-3}{4}", r"\frac{3}{-4}", "−3/4", r"-{3 \over 4}", r"-\nicefrac{3}{4}"),
        *(r"\textcolor{red}{-\frac34}", r"\boxed{\color{blue}{-\frac34}}", r"\boxed{\Large -\frac34}"),
        *(r"\underline{-\frac{3}{4}}", r"\boxed{\text{Slope} = -\frac34}", r"\boxed{-{{3}\over{4}}}"),
        r"\boxed{-\sfrac34}",
    ],
    "12": [
        *(r"\boxed{12\text{.}}", "So she earns $12/day.", r"$N = \boxed{12}$", "\\boxed{\n12\n}"),
        *("The final answer is $12$. I hope it is correct.", "**Answer:** $\\boxed{12}$ dollars"),
    ],
    r"\frac{1}{6}": [r"0.1\overline{6}", r"0.1\bar{6}", r"16\frac{2}{3}\%"],
    r"\{1,2,3\}": [r"1\text{, }2\text{, }3", r"\boxed{1}, \boxed{2} and \boxed{3}", r"\lbrace 3,2,1 \rbrace"],
    "-2, 3": [r"\boxed{-2} \quad \text{and} \quad \boxed{3}", r"x_1=-2,\ x_2=3", "$x=-2$ or $x=3$"],
    r"(-\infty, 0) \cup (2, \infty)": [
        *("x < 0 or x > 2", r"x<0\text{ or }x>2", r"\{x \mid x<0 \lor x>2\}", r"]-\infty,0[ \cup ]2,\infty["),
        r"\{x \in \mathbb{R} : x<0\text{ or }x>2\}",
    ],
    r"(-\infty,3)\cup(3,\infty)": [
        *(r"x \neq 3", r"\mathbb{R}\setminus\{3\}", r"\{x \mid x\neq 3\}", r"x\in\mathbb{R}, x\ne 3"),
        r"\boxed{\text{all real numbers except }3}",
    ],
    r"(-\infty,-2)\cup(-2,3)\cup(3,\infty)": [r"x\ne 3, -2", r"x\ne -2\text{ and }x\ne 3"],
    "[0,1)": ["[0,1[", r"x\ge 0\text{ and }x<1", r"\{x\mid 0\le x<1\}", "1 > x \\ge 0"],
    r"\sin^2 x": [r"1-\cos^2 x", r"\operatorname{sin}^2 x"],
    r"\arctan 2": [r"\tan^{-1} 2", r"\operatorname{arctan}(2)"],
    "e^2": [r"\exp(2)", r"\mathrm{e}^{2}"],
    "2+3i": [r"2+3\mathrm{i}", r"2 + 3\operatorname{i}"],
    r"\frac{n(n+1)}{2}": [r"\binom{n+1}{2}", r"\frac{n^2+n}{2}"],
    "4210_5": ["(4210)_5", r"(4210)_{5}"],
    "3:2": ["6:4", "3 to 2", r"3\text{ to }2", r"\frac{3}{2}", r"3\colon 2"],
    "1:2:3": ["2:4:6"],
    "(2,3)": ["x=2, y=3", "x = 2 and y = 3"],
    "x=2, y=3": ["(2,3)", "(x,y)=(2,3)", "y=3, x=2"],
    "f(x) = 2x+1": ["y = 2x+1"],
    # letters: capitals side by side are one name, others are factors
    "XVI": ["XVI", r"\boxed{\text{XVI}}", "The numeral is XVI.", "$XVI$"],
    "BAC": ["BAC", r"\boxed{BAC}"],
    "bac": ["bac", "BAC"],
    "xyz": ["zyx"],
    "2ab": ["2ba"],
    # LaTeX's spaces around an answer
    "30": [
        *(rf"\boxed{{30{space}}}" for space in (r"\,", r"\;", r"\:", r"\!", r"\ ", "~", r"\quad", "{}", r"\\")),
        *(r"\boxed{30\,.}", r"\boxed{30.\,}"),
        *(r"\boxed{\,30\,}", r"\boxed{30\hspace{1mm}}", r"\boxed{\ 30\ \text{cm}\,}", r"\boxed{{30}}"),
    ],
    "12:5": ["The ratio of boys to girls is 12:5.", "The ratio is 12 to 5.", "The ratio is $12:5$."],
    # names of a value
    "9": [
        *(rf"\boxed{{{name} = 9}}" for name in ("a+b", "xy", r"\frac{x}{y}", "|z|", "|AB|", "x_1", "x'", r"\lambda")),
        r"\boxed{f''(0) = 9}",
        *(r"\boxed{f^{-1}(3) = 9}", r"\boxed{\sin A = 9}", r"\boxed{9 = xy}", "So x = 9.", "So 3 x 3 = 9.", "Total: 9"),
    ],
    # an answer that is taken back
    "13": [
        r"\boxed{5}. Wait, that is not right. It is \boxed{13}.",
        *("The answer is 5. Wait, that is not right. It is 13.", "The answer is 5. No, wrong, the answer is 13."),
        *(r"\boxed{13}. Wait, I check: 6 + 7 = 13.", r"\boxed{13}. But it is not a power of 2."),
        r"\boxed{13}. No other value works.",
    ],
}  # fmt: skip

WRONG = {
    # words next to the only value of a sentence that change it, bound it or deny it
    "7": [
        *("The answer is negative 7.", "The answer is minus $7$.", "The answer is half of 7."),
        *("7 fails", "7 at most", "7 maximum", "Answer: 7 at most", r"\boxed{7 \text{ at most}}", "negative 7"),
        *("7 is wrong", "<answer>7</answer> is wrong", "<answer>7</answer> fails.", r"\boxed{7} is wrong."),
        *(r"\boxed{7}. This is incorrect.", r"So $\boxed{7}$ is not the answer.", r"The answer is not \boxed{7}"),
        *(r"It is wrong to say \boxed{7}", r"\boxed{7} cannot be the answer", r"\boxed{7} isn’t correct."),
        *("<answer>7 at most</answer>", "The answer is 7. That is wrong.", "#### 7\nThat is wrong."),
        r"\boxed{7} can't be right.",
        *(r"\boxed{7}\text{ is not correct}", r"\boxed{7} (wrong)", r"\boxed{7}\quad\textbf{(incorrect)}"),
        *(r"\boxed{7} (this is wrong)", r"\boxed{7} — wrong", r"\text{not }\boxed{7}", r"x \ne \boxed{7}"),
        *(r"$x = -\boxed{7}$", r"\boxed{7}\sqrt{2}", r"\boxed{7}^2", r"\boxed{7} \times 10^3"),
        "The answer is twice 7.",
        *("The answer is ten times 7", "The answer is the square root of 7", "The answer is the factorial of 7"),
        *("The answer is 7 less than x.", "x exceeds 7.", "at least $7$", "The answer is more than $7$"),
        *("The answer is anything but 7.", "The value 7 was ruled out", "It isn’t 7.", "So it can’t be 7."),
    ],
    "5": [
        *("6", "", " ", "-5", "5.1", "50", "55", "15", "0.5", "1/5", "five", "I do not know.", r"\boxed{}"),
        *(r"\boxed{5", "$", r"\boxed{6}", "５", "٥", "⑤", r"\boxed{５}", "<think>5</think>", "<think>5"),
        *("<think>5</think>6", "5</think>", r"\boxed{5}\boxed{6}", "5 or 6", "It is 5 or 6."),
        *(r"\boxed{5 \text{ or } 6}", "5, 6", r"\boxed{5}, \boxed{6}", "$5$ or $6$", "The answer is 5 or 6.", "4 to 5"),
        *("(5,6)", r"\boxed{6} is wrong: 5", "The answer is 6. Or 5.", "not 5", "The answer is not 5.", "5 < 6"),
        *("x > 5", "5=6", "5 = 5 = 6", "2+3", r"\boxed{2+3}", r"\sqrt{25}", r"\boxed{10/2}", r"\frac{10}{2}", "5!/4!"),
        *(r"\binom{5}{1}", r"\log_2 32", "|-5|", r"5 \cdot 1", "5^1", r"\int_0^5 1\,dx", r"\sum_{k=1}^5 1"),
        *(r"\lfloor 5.5 \rfloor", r"\boxed{7-2}", r"\lim_{x\to5} x", r"5\times10^0+0", r"\gcd(5,10)", "5x"),
        *("5 million", "5 dozen", "5 squared", "5 halves", "5i", r"5\pi", "5_8", "5e2", "5 5", "x_5", "x^5", "5!"),
        *("5 + x", r"\pm 5", "What is 5?", "Is it 5?", "Find the sum of the first 5 numbers.", "If $x = 5$, find $y$."),
        *("Let x = 5.", "Compute $5$.", "There are 5 boxes and 6 eggs.", "5 boxes hold 6 eggs each", "5 6", "#### 6"),
        *("5\n#### 6", "<answer>6</answer>", "<answer></answer>5"),
    ],
    "6": ["5=6", r"\boxed{5=6}", r"\boxed{5 = 6}", "5 = 6", r"\boxed{6} \boxed{5}", r"\boxed{2x = 6}", r"\boxed{6, 6}"],
    "1500": [
        *("1.5e4", "1,50", "15 00", "1.500", r"1.5 \times 10^4", "1,5", "1, 500", "(1,500)", "1.5", "1e1500"),
        "1.5e3000",
    ],
    "1000": ["1,0000", "10 00", "1 00 0"],
    "7/2": ["3 + 1/2", "31/2", "3 2/1", r"3\cdot\frac12", "2/7", "3, 1/2", "-3 1/2", r"\frac{7}{2}x"],
    r"\frac{1}{3}": ["0.333", "0.333333", "0.3333333333", "33%", "3", "1/3x"],
    "10": ["1000%", "0.10", "10_2", "1010_2", "10x"],
    r"10\%": ["1000", "0.01", "1%", "100%"],
    "0.5": ["0.5%", "5%"],
    "40_9": ["40", "40_8", "36", "40_{10}", "40_{9}x", "44_9"],
    "10_2": ["10_3", "10", "2", "10_{10}"],
    "2": ["10_2", "2_3"],
    "1,2": ["(1,2)", "[1,2]", "(1,2]", "1", "1,2,3", "1,3", "12", r"\{1,2,3\}", "1 < x < 2"],
    "(1,2)": ["1,2", "[1,2]", "(2,1)", "(1,2]", r"\{1,2\}", "(1,2,3)", "1<x<2", r"\langle 1,2\rangle", "1"],
    "[1,2]": ["(1,2)", "[2,1]", "1,2", "[1,2)"],
    r"\{1,2\}": ["(1,2)", "[1,2]", r"\{1\}", r"\{1,2,2\}"],
    "5 m": ["5 cm", "5 km", r"5\text{ cm}", "5 min", r"\boxed{5\%}x", "5 m^2", "$5", "5 m or 6 m"],
    r"15\mbox{ cm}^2": ["15 cm", "15 m^2", "225", "15 cm^3"],
    r"\$36": ["36 cents", "36¢", "EUR 36", "36 m", r"36^\circ"],
    r"5.4 \text{ cents}": [r"\$5.4", "5.4 dollars", "54 cents"],
    r"90^\circ": [r"\frac{\pi}{2}", "90 m", "90 radians", "9"],
    "A": [
        *("B", "(B)", "(A) or (B)", "A or B", "A, B", "The answer is (B).", "A cat", r"\boxed{AB}", "(A)(B)", "AA"),
        *("The answer isn’t (A).", "(A) is incorrect.", "We can eliminate (A).", "except (A)", "All but (A)."),
        "It can’t be (A).",
    ],
    r"\text{(C)}": ["(A), (B), (C)", "Is it (C)?", "5"],
    r"\text{Evelyn}": ["Navin", "not Evelyn", "Evelyn or Navin", "Is it Evelyn?", "Eve"],
    r"\text{even}": ["odd", "not even", "seven"],
    r"\varnothing": ["0", r"\{0\}", "", r"\{\emptyset\}", "1"],
    r"\infty": [r"-\infty", "0", "99999999999"],
    r"-\infty": [r"\infty"],
    r"\pm 3": ["3", "-3", r"\pm 4"],
    "3": [r"\pm 3", "3, -3", "3:1", "6:2", r"x \ne 3"],
    r"1 \pm \sqrt{19}": [r"1 + \sqrt{19}", r"1 \pm \sqrt{18}", r"-1 \pm \sqrt{19}"],
    r"2\sqrt{3}": ["3.4641", "3.46410161513775", r"2\sqrt{2}", r"\sqrt{3}", "2", r"\sqrt{10+2}"],
    r"\pi": ["3.14", "3.14159265358979", "22/7", "pie"],
    "x=5": ["y=5", "x=6", "x", "x=5, y=6", "x>5"],
    "y = 2x + 3": ["y = 2x", "x = 2y + 3", "2x", "y = 2x + 3 or y = x"],
    "2k": ["2", "k", "2k+1", "3k"],
    "(x+1)^2": ["(x-1)^2", "x^2+1", "(y+1)^2", "x^2+2x", "(x+1)^2 or (x-1)^2"],
    "x": [r"\sqrt{x^2}", "|x|", "X", "y"],
    "3628800": [
        *("10!", r"\boxed{10!}", r"10 \cdot 9!", r"\int_0^\infty x^{10}e^{-x}\,dx", r"\prod_{k=1}^{10} k"),
        r"\Gamma(11)",
    ],
    "1024": ["2^{10}", "32^2", "4^5"],
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}": [
        *(r"\begin{pmatrix} 1 & 2 \end{pmatrix}", "(1,2)", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
    ],
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": [
        *(r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}", r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}"),
    ],
    "x^3+3x-6": ["x^3+3x+6", "x^3+3x", "-6"],
    "72": ["It is 71 or 72", "72 and 71", "2 72s", "7 2", "7.2e2", "9 * 8", "There are 72 apples and 3 pears."],
    "3:4": ["4:3", "3", "3:5"],
    r"(-\infty,3)\cup(3,\infty)": [r"x=3", r"x\ne 4", r"\mathbb{R}", r"\mathbb{R}\setminus\{3,4\}", "x>3", "3"],
    r"(-\infty, 0) \cup (2, \infty)": ["x<0 and x>2", "0<x<2", r"x\le 0 or x>2", r"x<0\text{ or }y>2"],
    "[0,1)": ["]0,1]", "]0,1[", "x>0 and x<1", "x>=0 or x<1"],
    r"\frac{1}{6}": [r"0.\overline{16}", r"0.1\overline{5}", r"0.6\overline{1}"],
    "3:2": ["2:3", "1.5", "3", "3:2:1", "2 to 3", "6:40"],
    r"(5, \infty)": [r"\{y \mid x>5\}", r"x>5, y\in\mathbb{R}", r"y\in\mathbb{R}, x>5"],
    "2x+3": ["x = 2x+3"],
    "12": ["So each gets 12/three.", "She eats 12/fifths.", "It is 12/half.", "The value is 12/sin x."],
    "6:30": ["1:5", "6:3", "1/5"],
    "(2,3)": ["y=2, x=3", "x=2, x=3", "x=3, y=2", "x=2", "x=2 or y=3", "(y,x)=(2,3)"],
    "x=2, y=3": ["(3,2)", "x=3, y=2", "[2,3]"],
    "f(x) = 2x+1": ["x = 2x+1", "f(x) = 2x", "f(y) = 2x+1"],
    r"\tan^{-1} 2": [r"\frac{1}{\tan 2}", r"\tan 2"],
    "XVI": ["XIV", r"\boxed{\text{XIV}}"],
    "ABC": ["BAC", "CAB", r"\boxed{ACB}"],
    "bac": ["abc", "cab"],
    "ba": [r"\boxed{\text{ab}}", r"\mathrm{ab}"],  # letters that a font spells
    r"\text{ba}": ["ab", r"\text{ab}"],
    "0.25": [r"\boxed{P(X = 0.25)}", r"P(X=0.25)=0.5"],
    "dog": ["god"],
    # ":" between numbers is no verb
    "25": ["The ratio of boys to girls is 12:25.", "The ratio is 12 : 25.", "The ratio is 25:x.", "It is 25:12."],
    # an equation that is still to be solved
    "9": [
        *(
            rf"\boxed{{{left} = 9}}"
            for left in ("-x", r"\sqrt{x}", "sqrt(x)", "|x|", r"\ln x", "x!", "x^2", "1/x", r"x \cdot x")
        ),
        *(rf"\boxed{{{left} = 9}}" for left in (r"\pi x", "e^x", "-x-y", "(-x)", "x^{-1}", "ix", r"\log_2 x", "-f(x)")),
        *(r"\boxed{9 = -x}", "$-x = 9$", "So -x = 9.", "So 2x = 9.", "So x + 3 = 9.", "Thus x/2 = 9.", "So √x = 9."),
    ],
    "-x = 9": ["x = 9", "9"],
    # the last mark counts, also an empty one
    "13": [
        *(r"\boxed{13}. So finally \boxed{}", r"\boxed{13} \boxed{ }", r"\boxed{13}, \fbox{}"),
        *(r"\boxed{13} \boxed{\,}", "#### 13\n####", "<answer>13</answer><answer></answer>"),
        # words directly behind an answer that take it back
        *(r"\boxed{13}. Wait, that is not right. It should be 14.", r"\boxed{13}. No, that's wrong."),
        r"\boxed{13}? No, wrong.",
        *("The answer is 13. Wait, that is incorrect.", "#### 13\nWait, that is wrong."),
        "The answer is 13. Oh no, I made a mistake, it should be 5.",
        r"\boxed{13}. I have made an arithmetic error.",
        r"\boxed{5}. Wait, that is not right. It should be 13.",
    ],
}  # fmt: skip


def judged(claims: dict[str, list[str]], *, correct: bool) -> list[tuple[str, str]]:
    """The claims (answer, completion) that the reward judges so."""
    return [
        (gold, completion)
        for gold, completions in claims.items()
        for completion in completions
        if mathematics.score("", completion, {"answer": gold}).correct == correct
    ]


def test_completions_are_right() -> None:  # item 3
    assert judged(RIGHT, correct=False) == []


def test_completions_are_wrong() -> None:  # items 3 and 23
    assert judged(WRONG, correct=True) == []


DEEP = r"\frac{1}{"
POISON = [  # long, deep, large or malformed: each was an error or a hang for some verifier
    *("\uff15", "5 " * 16000, "9" * 5000, "1e999999999", "1" * 100_000, "\ud800", "\x00" * 1000, "\u00b2" * 1000),
    *(r"\boxed{10^{10^{10}}}", r"\boxed{9^{9^{9^{9}}}}", r"$10^{10^{10}}$", r"\boxed{(10^9)!}", r"\boxed{2^{9999999}}"),
    *(r"\boxed{" + DEEP * 30 + "2" + "}" * 31, DEEP * 60 + "2" + "}" * 60, "(" * 300 + "5" + ")" * 300, "\\" * 10_000),
    *(rf"\boxed{{{'9' * 5000}}}", rf"\boxed{{{'9^{999}' * 80}}}", rf"\boxed{{{'(x+1)^{999}' * 80}}}"),
    *(rf"\boxed{{{'1+' * 400}1}}", rf"\boxed{{{'x+' * 140}x}}", rf"\boxed{{{'x!' * 200}}}", rf"\boxed{{{'-' * 900}5}}"),
    *(
        r"\boxed{" + r"\frac{1}{7^{999}}+" * 60 + "1}",
        r"\boxed{" + r"\pm 1," * 90 + "5}",
        r"\boxed{" + r"\{" * 300 + "}",
    ),
    *("<think>" * 20_000, "answer is " * 20_000, "####" * 20_000, "$" * 50_000, "5, " * 20_000, "5=" * 5000),
    *("a " * 50_000, "is " * 30_000, "<<" * 30_000, "1 000 " * 5000, "1,000," * 10_000, "\\sin " * 300, "**" * 20_000),
    *("</s>" * 14_000 + "x", "<think>hm</think>" + " " * 60_000 + "x 5 6", "</s> " * 30_000 + "x"),
    *(r"\boxed{" * 10_000, "x \\in " * 3000, rf"\boxed{{{'500!' * 200}}}"),
]
GOLDS = ["6", r"\frac{1}{2}", "x^2+1", "1,-2", r"\text{east}", "B", "(1,2)", "x=6", "40_9", "6 m", r"2\sqrt{3}"]


@pytest.mark.slow
@pytest.mark.parametrize("completion", POISON, ids=range(len(POISON)))
def test_an_invalid_completion_is_a_verdict_of_false(completion: str) -> None:  # item 2
    assert [mathematics.score("", completion, {"answer": gold}).correct for gold in GOLDS] == [False] * len(GOLDS)


def test_no_mixture_of_notation_raises() -> None:  # item 2
    draw = random.Random(7)
    pieces = r"\frac { } ( ) [ ] ^ _ 5 12 x y \sqrt \pi + - * / = \le < , ; \text{ and or \pm ! % \% $ \$ \boxed{ \cup"
    pieces += r" \infty & is \begin{pmatrix} \end{pmatrix} \\ | \log \sin e i 1e5 . 0 \{ \} \left ' ^\circ \approx cm"
    pieces += r" #### \binom \langle \lfloor _9"
    for i in range(4000):
        text = "".join(draw.choices(pieces.split(), k=draw.randint(1, 25)))
        completion = text if i % 2 else rf"\boxed{{{text}}}"
        assert not mathematics.score("", completion, {"answer": "31/17"}).correct, completion


@pytest.mark.parametrize("answer", ["", " ", "#### ", "$$", "x" * 1001, None, True, ["5"]])
def test_an_answer_of_a_row_that_is_none_is_an_error(answer: object) -> None:  # item 2
    with pytest.raises(ValueError, match="the answer of a row must be"):
        mathematics.score("", "5", {"answer": answer})


@pytest.mark.parametrize(("answer", "right"), [(27.0, True), (27, True), (27.5, False), ("27.0", True)])
def test_an_answer_of_a_row_may_be_a_number(answer: object, right: bool) -> None:
    assert mathematics.score("", r"\boxed{27}", {"answer": answer}).correct is right


def test_the_prompts_own_formula_is_no_answer() -> None:  # item 23
    prompt = "Expand $(x+1)(x-1)$ and simplify."
    assert not mathematics.score(prompt, r"\boxed{(x+1)(x-1)}", {"answer": "x^2-1"}).correct
    assert mathematics.score(prompt, r"\boxed{x^2 - 1}", {"answer": "x^2-1"}).correct
    assert mathematics.score("Is $x^2-1$ a square?", r"\boxed{x^2-1}", {"answer": "x^2-1"}).correct
