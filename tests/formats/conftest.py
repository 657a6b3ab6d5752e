from hypothesis import settings

settings.register_profile("patient", deadline=None)  # other people's work may slow a run down
settings.load_profile("patient")
