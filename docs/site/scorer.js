// Sphinx's scores, and pages to look up or of measurements below those that tell how something is done.
const LAST = /^(faq|glossary|environment|changelog|old-commands|contributing|measured\/|reference\/commands)/;
var Scorer = {
  score: ([page, , , , score]) => score - (LAST.test(page) ? 10 : 0),
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
// A page that is opened from a disk may not read the others for their summaries.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// Sphinx shows pages that have all words of a query, by the score of the best word. Here every word
// counts, a rare one more than a common one, and one that keywords.yaml has for the page as a title.
// Pages that lack a word count half, and are left out if that is little.
{
  const pagesOf = Search.performTermsSearch;
  const stemmer = new Stemmer();
  const named = (page, word) =>
    (SEARCH_WORDS[page] ?? []).some((name) => name === word || stemmer.stemWord(name) === word);
  Search.performTermsSearch = (words, excluded) => {
    const scores = new Map();
    const results = new Map();
    for (const word of words) {
      const having = pagesOf(new Set([word]), excluded);
      const weight = Math.log2(1 + Search._index.docnames.length / having.length) / words.size;
      for (const result of having) {
        const [page, , , , score] = result;
        const points = named(page, word) ? Scorer.title : score;
        scores.set(page, (scores.get(page) ?? 0) + weight * points);
        results.set(page, result);
      }
    }
    const whole = new Set(pagesOf(words, excluded).map(([page]) => page));
    for (const [page, score] of scores) if (!whole.has(page)) scores.set(page, score / 2);
    const best = Math.max(...scores.values());
    return [...results.values()]
      .map(([page, title, anchor, text, , ...rest]) =>
        [page, title, anchor, text, scores.get(page), ...rest])
      .filter(([page, , , , score]) => whole.has(page) || score > best / 3);
  };
}
