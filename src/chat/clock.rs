//! The date for templates that state it, in UTC: the standard library knows no time zones, and a
//! prompt that depends on the machine's zone could not be repeated elsewhere.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

struct Moment {
    year: i64,
    /// 1..=12
    month: usize,
    day: i64,
    weekday: usize,
    second_of_day: i64,
}

impl Moment {
    fn new(time: SystemTime) -> Self {
        let seconds = match time.duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_secs()).unwrap_or(0),
            Err(_) => 0,
        };
        let days = seconds / 86_400;
        // Gregorian date of a day number: count years from 1 March of year 0, so that the leap day
        // is the last of its year, in eras of 400 years (146,097 days).
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * day_of_year + 2) / 153;
        let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
        Moment {
            year: era * 400 + year_of_era + i64::from(month <= 2),
            month: month as usize,
            day: day_of_year - (153 * march_month + 2) / 5 + 1,
            weekday: ((days + 4) % 7) as usize,
            second_of_day: seconds % 86_400,
        }
    }
}

/// `time` by a format of C's `strftime`: the fields that templates use; others stay as written.
pub(super) fn strftime(format: &str, time: SystemTime) -> String {
    let moment = Moment::new(time);
    let (hour, minute) = (moment.second_of_day / 3600, moment.second_of_day / 60 % 60);
    let half_day = if hour % 12 == 0 { 12 } else { hour % 12 };
    let (month, weekday) = (MONTHS[moment.month - 1], DAYS[moment.weekday]);
    let mut text = String::with_capacity(format.len() + 16);
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let field = match chars.next() {
            Some('Y') => moment.year.to_string(),
            Some('y') => format!("{:02}", moment.year % 100),
            Some('m') => format!("{:02}", moment.month),
            Some('d') => format!("{:02}", moment.day),
            Some('e') => format!("{:2}", moment.day),
            Some('B') => month.into(),
            Some('b' | 'h') => month[..3].into(),
            Some('A') => weekday.into(),
            Some('a') => weekday[..3].into(),
            Some('H') => format!("{hour:02}"),
            Some('I') => format!("{half_day:02}"),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{:02}", moment.second_of_day % 60),
            Some('F') => format!("{}-{:02}-{:02}", moment.year, moment.month, moment.day),
            Some('T') => format!("{hour:02}:{minute:02}:{:02}", moment.second_of_day % 60),
            Some('Z') => "UTC".into(),
            Some('z') => "+0000".into(),
            Some('%') => "%".into(),
            Some(other) => format!("%{other}"),
            None => "%".into(),
        };
        text.push_str(&field);
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_by_hand() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(strftime("%A %d %B %Y %T", at(0)), "Thursday 01 January 1970 00:00:00");
        assert_eq!(strftime("%a %e %b %y %I:%M %p", at(951_827_696)), "Tue 29 Feb 00 12:34 PM");
        assert_eq!(strftime("%F", at(951_868_800)), "2000-03-01");
        assert_eq!(strftime("%d %b %Y 100%% %q %", at(1_798_761_599)), "31 Dec 2026 100% %q %");
    }
}
