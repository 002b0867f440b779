"""The pages stay short and light to read: see words.py."""
import pytest
import words
from conftest import ROOT

MOST = {"README.md": 700, "docs/questions.md": 900, "docs/figures.md": 500, "docs/variants.md": 800, "docs/measurements.md": 2500}


@pytest.mark.parametrize("name", MOST)
def test_a_page_can_be_taken_in(name):
    found = words.measure((ROOT / name).read_text())
    assert found["words"] <= MOST[name] and found["words a sentence"] <= 22 and found["numbers a sentence"] <= 1, found


PAGE = """# A title of 2020

One *sentence* with `--flag 3` and 25% of it. Another, of SmolLM2-135M at pass@8: see figure 5, arXiv 2402.03300 and
[a page](other.md#at-7). (A third: −1.5 to +2,000 points of 7B.)

- an item without a mark
- 4 moves, then
  more

| a | table of 9 |
|---|---|

![a picture of 9](x.png)

<details><summary>Folded</summary>

9 words

</details>

```
code 9
```
"""


def test_what_is_counted():
    """By hand: numerals outside of code and names, and words that are seen."""
    assert [words.numbers(sentence) for sentence in words.sentences(PAGE)] == [["25%"], [], ["−1.5", "+2,000", "7B"], [], ["4"]]
    assert [len(words.words(sentence)) for sentence in words.sentences(PAGE)] == [9, 13, 8, 5, 4]
    assert words.measure(PAGE) == {"words": 4 + 39, "words a sentence": 39 / 5, "numbers a sentence": 1}


def test_the_table(capsys, tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    words.main([str(tmp_path / "page.md")])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == "words words a sentence numbers a sentence".split() and row.split() == ["page.md", "43", "7.8", "1.00"]
