"""Never imported."""
