import io
import logging

from rich.console import Console

from pretrain._output import log_lines


def test_information_of_the_launcher_is_a_plain_line_of_its_own(caplog):
    file = io.StringIO()
    logger = logging.getLogger("ray_jax_launch")
    with log_lines(Console(file=file, width=20)):
        logger.info("worker %d of 2: node 10.0.0.1, 1 device ([cpu])", 0)
        logger.warning("a warning goes to standard error")
        logger.debug("a detail")
    logger.info("after the run")
    assert file.getvalue() == "worker 0 of 2: node 10.0.0.1, 1 device ([cpu])\n"
    assert "a warning goes to standard error" in caplog.messages
