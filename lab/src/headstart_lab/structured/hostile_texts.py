"""Regular expressions and Lark grammars that are expensive or wrong, for hostile_grammars.py."""


def regexes() -> dict[str, str]:
    """Return regular expressions by name."""
    return {
        "(a*)*b": "(a*)*b",
        "((a*)*)*": "((((a*)*)*)*)*b",
        "a? 3,000 a 3,000": "a?" * 3_000 + "a" * 3_000,
        "(x+x+)+y": "(x+x+)+y",
        ".*a.{12}": ".*a.{12}",
        ".*a.{18}": ".*a.{18}",
        ".*a.{40}": ".*a.{40}",
        "(.*a){30}": "(.*a){30}",
        "(.*a.*b.*c){20}": "(.*a.*b.*c){20}",
        "a{1,1000000}": "a{1,1000000}",
        "(a{1,1000}){1,1000}": "(a{1,1000}){1,1000}",
        "((((a{1,99}){1,99}){1,99}){1,99}": "((((a{1,99}){1,99}){1,99}){1,99})",
        "5,000 alternatives": "|".join(f"w{i * 7919 % 100_003}x" for i in range(5_000)),
        "5,000 alternatives with stars": "|".join(f".*w{i}" for i in range(5_000)),
        "200 alternatives with stars": "|".join(f".*w{i}.*v{i}" for i in range(200)),
        "nested groups 5,000": "(" * 5_000 + "a" + ")" * 5_000,
        "nested groups 100,000": "(" * 100_000 + "a" + ")" * 100_000,
        "nested stars 2,000": "(" * 2_000 + "a" + ")*" * 2_000,
        "\\p{L}{1000}": "\\p{L}{1000}",
        "(\\p{L}\\p{N}){1,500}": "(\\p{L}\\p{N}|\\w\\s){1,500}",
        "case insensitive": "(?i)" + "stra\u00dfe\u017fk" * 500,
        "[\\s\\S]{5000}": "[\\s\\S]{0,5000}x[\\s\\S]{0,5000}",
        "(.|\\n)*x(.|\\n){15}": "(.|\\n)*x(.|\\n){15}",
        "empty": "",
        "unclosed": "(((",
        "lookbehind": "(?<=a)b",
        "back reference": "(a)\\1",
        "bad range": "[z-a]",
        "repetition out of range": "a{99999999999999999999}",
        "a nul and a surrogate": "\\x00\\ud800",
        "words boundary": "\\ba\\b",
    }


def larks() -> dict[str, str]:
    """Return Lark grammars by name."""
    return {
        "ambiguous s: s s | a": 'start: s\ns: s s | "a" | ""',
        "ambiguous s: s s s": 'start: s\ns: s s s | s s | "a" | "b"',
        "ambiguous binary": 'start: e\ne: e "+" e | e "*" e | e "-" e | "(" e ")" | e e | /[a-z]+/ | /[a-z]+[0-9]*/',
        "empty rules": 'start: a\na: b b b b b b b b\nb: c c c c c c c c\nc: d d d d d d d d\nd: a | "x" |',
        "left and right": 'start: a\na: a "x" a | b\nb: a | b b | "x"',
        "20 nullable": "start: "
        + " ".join(f"r{i}" for i in range(20))
        + "\n"
        + "\n".join(f'r{i}: r{(i + 1) % 20}* | "x"*' for i in range(20)),
        "nullable star of star": 'start: (a*)*\na: ("x"*)*',
        "star of star of terminals": "start: (A* B*)* (A* B*)* (A* B*)* (A* B*)*\nA: /x+/\nB: /x*y?/",
        "palindromes": 'start: "a" start "a" | "b" start "b" | "a" | "b" | ""',
        "200 overlapping terminals": "start: ("
        + " | ".join(f"T{i}" for i in range(200))
        + ")*\n"
        + "\n".join(f"T{i}: /[a-z]{{1,{i + 1}}}/" for i in range(200)),
        "2,000 overlapping terminals": "start: ("
        + " | ".join(f"T{i}" for i in range(2_000))
        + ")*\n"
        + "\n".join(f"T{i}: /.*[a-z]{{1,{i % 30 + 1}}}/" for i in range(2_000)),
        "intersection of terminals": "start: T\nT: " + " & ".join(f"/.*{chr(97 + i)}.{{{i + 3}}}/" for i in range(10)),
        "complement": "start: T\nT: ~/.*a.{14}/",
        "complement of complement": "start: T\nT: ~(~(~(/.*a.{10}/ & /.*b.{9}/)))",
        "complement of counted": "start: T\nT: ~(/.*(ab|ba).{12}(c|d)/) & /[a-d]{3,400}/",
        "repetition of rules": 'start: a{1,100000}\na: "x" | "y"',
        "repetition nested": 'start: a{1,300}\na: b{1,300}\nb: c{1,300}\nc: "x"?',
        "repetition of nullable": 'start: a{0,5000}\na: "x"?',
        "rules 20,000": "start: r0\n"
        + "\n".join(f'r{i}: "a" r{i + 1} | "b" r{i + 1}' for i in range(20_000))
        + '\nr20000: "z"',
        "rule undefined": "start: nothing",
        "rule of itself": "start: start",
        "circle": "start: a\na: b\nb: a",
        "json inside": 'start: a\na: %json {"properties":{"x":{"type":"string","pattern":".*a.{15}"}}}',
        "lark of itself nested": 'start: %lark {\nstart: "a"\n}',
        "regex in lark": "start: /(a|aa)*(b|bb)*{300}/",
        "long literal": 'start: "' + "x" * 300_000 + '"',
        "case insensitive literal": 'start: "' + "xyz" * 20_000 + '"i',
        "suffix and stop": 'start: t\nt[stop="", suffix="x"]: /.*/',
        "lazy": "start: t u\nt[lazy]: /(a|b)*.{12}b/\nu: /.*/",
        "max tokens": "start: t\nt[max_tokens=1000000000]: /.*/",
        "import": "start: T\n%import common.WORD\nT: WORD",
        "ignore of everything": "start: A*\nA: /[a-z]+/\n%ignore /.*/",
        "special tokens": "start: <[0-1000000]> <|im_end|>",
        "nested parentheses": "start: " + "(" * 3_000 + '"a"' + ")" * 3_000,
        "brackets": 'start: "(" start ")" | "[" start "]" | start start | ""',
    }
