//! What is made of the figures of several rounds.

use serde::{Deserialize, Serialize};

use super::case::Better;

/// Median and spread.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Spread {
    /// The middle one, or the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
}

/// Of these figures, if there are any.
pub fn spread(figures: &[f64]) -> Option<Spread> {
    let mut sorted: Vec<f64> = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (least, most) = (*sorted.first()?, *sorted.last()?);
    let half = sorted.len() / 2;
    let median = match sorted.len() % 2 {
        0 => f64::midpoint(sorted[half - 1], sorted[half]),
        _ => sorted[half],
    };
    Some(Spread { median, least, most })
}

/// How many times better each figure is than that of the same round; above 1 is better.
pub fn factors(figures: &[f64], than: &[f64], better: Better) -> Vec<f64> {
    let pairs = figures.iter().zip(than);
    let factor = |(figure, than): (&f64, &f64)| match better {
        Better::Higher => figure / than,
        Better::Lower => than / figure,
    };
    pairs.map(factor).filter(|factor| factor.is_finite() && *factor > 0.0).collect()
}

/// Three digits that count.
pub fn short(figure: f64) -> String {
    let size = figure.abs();
    if size >= 100.0 || figure == 0.0 {
        return format!("{figure:.0}");
    }
    let digits = (2.0 - size.log10().floor()).clamp(0.0, 6.0) as usize;
    let text = format!("{figure:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

impl Spread {
    /// `median (least–most)`; the median alone where they are the same.
    pub fn shown(&self) -> String {
        let [median, least, most] = [self.median, self.least, self.most].map(short);
        if least == most { median } else { format!("{median} ({least}–{most})") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle_whatever_the_order() {
        let of = |figures: &[f64]| spread(figures).expect("figures");
        assert_eq!(of(&[3.0, 1.0, 2.0]), Spread { median: 2.0, least: 1.0, most: 3.0 });
        assert_eq!(of(&[4.0, 1.0, 2.0, 100.0]), Spread { median: 3.0, least: 1.0, most: 100.0 });
        assert_eq!(of(&[5.0]), Spread { median: 5.0, least: 5.0, most: 5.0 });
        assert_eq!(spread(&[]), None);
    }

    #[test]
    fn a_factor_above_one_is_better_whatever_is_measured() {
        assert_eq!(factors(&[200.0, 50.0], &[100.0, 100.0], Better::Higher), [2.0, 0.5]);
        assert_eq!(factors(&[2.0, 8.0], &[4.0, 4.0], Better::Lower), [2.0, 0.5]);
        assert_eq!(factors(&[2.0, 0.0], &[4.0, 4.0], Better::Lower), [2.0], "nothing by nothing");
        assert_eq!(factors(&[2.0], &[], Better::Lower), [0.0; 0]);
    }

    #[test]
    fn figures_are_short() {
        for (figure, text) in [
            (0.0, "0"),
            (0.1349, "0.135"),
            (0.001234, "0.00123"),
            (2.5, "2.5"),
            (9.996, "10"),
            (36.14, "36.1"),
            (100.4, "100"),
            (44_600.0, "44600"),
            (-1.25, "-1.25"),
        ] {
            assert_eq!(short(figure), text);
        }
        let text = Spread { median: 2.0, least: 1.5, most: 2.25 }.shown();
        assert_eq!(text, "2 (1.5–2.25)");
    }
}
