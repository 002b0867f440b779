"""How dense the code is to read, and how much else one must know: `python tests/upstream/density.py [FILES]`

A code line is one with more than blanks, a comment or a docstring. `characters` are those of a code line without its
indentation, `wide` is the share of code lines beyond 80 columns, `nodes` are the expressions and statements of the syntax
tree for each code line. `modules` are the project's own that a file imports, `names` those that it uses out of them.
"""
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = ("data", "experiments", "grpo", "model", "reward", "run")


def measure(text):
    """The measures of a file's text, by name."""
    tree = ast.parse(text)
    code = code_lines(text, tree)
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.expr, ast.stmt))]
    modules, names = taken(tree)
    n = max(1, len(code))
    return {"lines": len(code), "characters": sum(len(line.strip()) for line in code) / n,
            "wide": sum(len(line) > 80 for line in code) / n, "nodes": len(nodes) / n,
            "modules": len(modules), "names": len(names)}


def code_lines(text, tree):
    """The lines of a text that are not blank, a comment or part of a docstring."""
    said = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            said.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return [line for n, line in lines if n not in said and line.strip() and not line.strip().startswith("#")]


def taken(tree):
    """The project's own modules that are imported, and the names that are used out of them: by `from`, or after a dot."""
    modules, names = {}, set()              # modules: by the name that they have in the file
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names if is_own(alias.name)}
        elif isinstance(node, ast.ImportFrom) and is_own(node.module):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if (ROOT / f"{whole.replace('.', '/')}.py").exists():
                    modules[alias.asname or alias.name] = whole
                else:
                    modules[node.module] = node.module
                    names.add(whole)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
            names.add(f"{modules[ast.unparse(node.value)]}.{node.attr}")
    return set(modules.values()), names


def is_own(module):
    """Whether a module is the project's."""
    return module.split(".")[0] in OWN


def main(files):
    """Prints a table."""
    print(f"{'':24}lines  characters  wide  nodes  modules  names")
    for file in files or [ROOT / name for name in ("grpo.py", "model.py", "reward.py")] + sorted((ROOT / "run").glob("*.py")):
        m = measure(Path(file).read_text())
        name = Path(file).resolve().relative_to(ROOT) if Path(file).resolve().is_relative_to(ROOT) else file
        print(f"{str(name):24}{m['lines']:5}  {m['characters']:10.1f}  {m['wide']:4.0%}  {m['nodes']:5.1f}  {m['modules']:7}  {m['names']:5}")


if __name__ == "__main__":
    main(sys.argv[1:])
