"""How much there is to read on a page, and how dense it is: `python tests/upstream/words.py [FILES]`

Visible words are those of the prose and its headings, without code blocks, tables, what is folded,
pictures, targets of links and HTML. A sentence ends with its mark, its paragraph or its list item;
headings are none. A number is a numeral with its sign and unit, but not in `code`, in a name
(SmolLM2, pass@8), or where it only points (figure 5, eq. 4, arXiv 2402.03300, torch 2.11).
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HIDDEN = (r"^ *```.*?^ *```|<details>.*?</details>|<!--.*?-->|^ *\|.*?$|!\[.*?\]\(.*?\)|"
          r"<\w[^>]*>|</\w+>")
END = r"(?<=[.!?])[*\"')\]]*\s+(?=[A-Z0-9`*\[(\"'$])"
POINTS = (r"\b(?:sections?|eqs?\.|[Ff]igures?|[Ss]tep|arXiv|Algorithm|Python|torch)\s[\d.]*\d"
          r"(?:(?:,| and| to|, and)\s\d+)*")
NUMBER = r"(?<![\w@.,/^-])[-−+]?\d[\d,]*(?:\.\d+)*(?:%|[BMk]\b)?(?![\w@])"


def visible(text):
    """The text of a page that counts as prose, with its headings."""
    text = re.sub(HIDDEN, "", text, flags=re.S | re.M)
    return re.sub(r"\]\([^)]*\)", "]", text)


def words(text):
    """Those with a letter or a digit."""
    return [word for word in text.split() if re.search(r"\w", word)]


def sentences(text):
    """The sentences of a page's visible text."""
    body = re.sub(r"^#.*$", "", visible(text), flags=re.M)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", body)
    parts = [re.sub(r"^\s*(?:[-*]|\d+\.)\s", "", part) for part in parts]
    found = [sentence for part in parts for sentence in re.split(END, part.strip())]
    return [" ".join(sentence.split()) for sentence in found if words(sentence)]


def numbers(sentence):
    """The numbers of a sentence."""
    return re.findall(NUMBER, re.sub(POINTS, "", re.sub(r"`[^`]*`", "", sentence)))


def measure(text):
    """The visible words of a page, and the words and numbers of a sentence on average."""
    of = sentences(text)
    n = max(1, len(of))
    return {"words": len(words(visible(text))),
            "words a sentence": sum(len(words(sentence)) for sentence in of) / n,
            "numbers a sentence": sum(len(numbers(sentence)) for sentence in of) / n}


def main(files):
    """Prints a table."""
    print(f"{'':24}words  words a sentence  numbers a sentence")
    for file in map(Path, files or PAGES):
        of = measure(file.read_text())
        print(f"{file.name:24}{of['words']:5}  {of['words a sentence']:16.1f}  "
              f"{of['numbers a sentence']:18.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
