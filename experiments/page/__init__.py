"""The page that shows one run, or several side by side: what `oretrofit report` writes."""
