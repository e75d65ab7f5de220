"""dicomm-bench: what messages and collectives cost, beside Gloo and whatever else is installed."""


def main() -> None:
    from dicomm.bench.cli import app  # late: the measured processes import this package too

    app()
