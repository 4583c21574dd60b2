from tests.bench.report import Report
def run() -> Report: raise AssertionError
