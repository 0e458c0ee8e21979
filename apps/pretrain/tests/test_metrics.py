from pretrain._metrics import append_metrics, cut_metrics, read_metrics


def test_records_come_back_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    records = [{"step": 0, "val_loss": 5.5}, {"step": 10, "loss": 0.1 + 0.2}]
    for record in records:
        append_metrics(path, record)
    assert read_metrics(path) == records


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]


def test_what_a_resumed_run_repeats_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 10}\n{"step": 20}\n{"step": 30')
    cut_metrics(path, 10)
    assert path.read_text() == '{"step": 0}\n{"step": 10}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
