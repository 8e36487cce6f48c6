"""What `--sweep` says, and the points that it spans."""

import pytest

from k3jax.config import ConfigError
from launch.sweep_axes import parse_axis, points


def test_values_keep_their_commas_in_brackets_and_quotes():
    axis = parse_axis("""ModelConfig.mla_layers = (1, 2), [3], None,"a,b" ,muon, -1.5e-3""")
    assert axis.name == "ModelConfig.mla_layers"
    assert [choice.label for choice in axis.choices] == ["(1, 2)", "[3]", "None", "a,b", "muon", "-1.5e-3"]
    assert axis.choices[3].bindings == ('ModelConfig.mla_layers = "a,b"',)


def test_several_bindings_under_a_name():
    axis = parse_axis('size: small{A.x=1; A.y=(1, 2);}, big-2{A.x=2; A.s="a; b"}')
    assert axis.name == "size"
    assert axis.choices == (("small", ("A.x=1", "A.y=(1, 2)")), ("big-2", ("A.x=2", 'A.s="a; b"')))


def test_a_file_has_a_choice_a_line(tmp_path):
    (tmp_path / "v").write_text("# rates\n1e-3\n\n(1, 2)  # both\n")
    assert [c.label for c in parse_axis(f"A.x=@{tmp_path / 'v'}").choices] == ["1e-3", "(1, 2)"]
    (tmp_path / "n").write_text("a{A.x=1; A.y=2}\nb{A.x=2}\n")
    assert [c.label for c in parse_axis(f"n: @{tmp_path / 'n'}").choices] == ["a", "b"]


def test_product_has_the_last_axis_fastest_and_zip_goes_side_by_side():
    axes = [parse_axis("ModelConfig.a=1,2"), parse_axis("TrainConfig.seed=0,1")]
    assert [p.name for p in points(axes, "product")] == ["a=1,seed=0", "a=1,seed=1", "a=2,seed=0", "a=2,seed=1"]
    assert [p.name for p in points(axes, "zip")] == ["a=1,seed=0", "a=2,seed=1"]
    assert points(axes, "zip")[1].bindings == ("ModelConfig.a = 2", "TrainConfig.seed = 1")


def test_names_are_fit_for_folders_and_distinct():
    both = [parse_axis("DataConfig.seed=0"), parse_axis("TrainConfig.seed=0"), parse_axis("A.p='a/b','a b'")]
    names = [p.name for p in points(both, "product")]
    assert names[0] == "DataConfig.seed=0,TrainConfig.seed=0,p=a_b"
    assert len(set(names)) == 2 and all("/" not in name for name in names)
    long = [parse_axis("A.p=" + ",".join(letter * 300 for letter in "ab"))]
    assert [len(p.name) for p in points(long, "product")] == [120, 120]


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (["A.x"], "write FIELD=V1,V2"),
        (["A.x=1,,2"], "an empty value"),
        (["A.x="], "an empty value"),
        (["A.x=(1,2"], ") is missing at the end"),
        (["A.x=1)"], ") without its opening bracket"),
        (["A.x=1,1"], "1 is there twice"),
        (["n: a{A.x}"], "write a name and its bindings"),
        (["n: a"], "write a name and its bindings"),
        (["A.x=@nowhere"], "nowhere cannot be read (No such file"),
        (["A.x=1", "A.x=2"], "this axis is given twice"),
        (["A.x=1", "n: a{A.x=2}"], "A.x is swept by A.x too"),
    ],
)
def test_mistakes_are_one_line(texts, line):
    with pytest.raises(ConfigError) as caught:
        points([parse_axis(text) for text in texts], "product")
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_zip_needs_axes_of_one_length():
    with pytest.raises(ConfigError, match=r"A\.x has 2, A\.y has 1"):
        points([parse_axis("A.x=1,2"), parse_axis("A.y=1")], "zip")
