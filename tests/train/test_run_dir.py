"""What a run directory says of itself."""

import pytest

from k3jax.train.run_dir import RunDir, RunRefused


@pytest.mark.parametrize("text", ["[]", "3", "null", '{"model": 3}', '{"model": "abc"}', '{"data": [[]]}', "{", "\xff"])
def test_a_config_of_another_form_is_refused_in_one_line(tmp_path, text):
    run = RunDir(tmp_path)
    run.config_json.write_bytes(text.encode("latin-1"))
    with pytest.raises(RunRefused, match=r"config\.json cannot be read") as caught:
        run.load_config()
    assert "\n" not in str(caught.value)
